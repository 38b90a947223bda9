#!/bin/bash
# One run on 2 nodes of 8 GPUs with LSF: bsub < lsf.sh in the folder of the runs. Not run on a real site: adapt it to yours.
#BSUB -J clipx
#BSUB -n 2
#BSUB -R "span[ptile=1]"
#BSUB -gpu "num=8"
#BSUB -W 24:00
#BSUB -wa USR1
#BSUB -wt 10
#BSUB -r
#BSUB -Q "75"
#BSUB -o clipx.%J.log
# -wa, -wt: USR1 ten minutes before the limit, at which the run saves; -Q: requeued if this script exits with 75.
run=(model=vit_b32 data=laion400m 'data.shards=/scratch/laion400m/{00000..41407}.tar' run_dir=outputs/vit_b32)

trap : USR1 TERM # blaunch forwards them to its process: wait for the run to save
source ~/venv/bin/activate
mapfile -t hosts < <(sort -u "$LSB_DJOB_HOSTFILE")
script="$PWD/clipx-$LSB_JOBID.sh"
clipx-sweep script torchrun nodes="${#hosts[@]}" tasks_per_node=8 host="${hosts[0]}" -- "${run[@]}" > "$script" || exit
pids=()
for number in "${!hosts[@]}"; do
  blaunch -z "${hosts[number]}" bash "$script" "$number" &
  pids+=("$!")
done
code=0
for pid in "${pids[@]}"; do
  wait "$pid" || code=$?
  while kill -0 "$pid" 2> /dev/null; do # a signal ends `wait` before the process has ended
    wait "$pid" || code=$?
  done
done
rm -f "$script"

# torchrun exits with 1 for any code of its ranks: the last event tells whether the run has saved after a signal.
last=$(grep -oE '"event": "(start|stopped|end)"' outputs/vit_b32/events.jsonl | tail -n 1)
[[ "$last" == *stopped* ]] && exit 75
[[ "$last" == *end* ]] && exit 0
exit "$code"
