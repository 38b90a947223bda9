#!/bin/bash
# One run on 2 nodes of 8 GPUs with PBS: qsub pbs.sh in the folder of the runs. Not run on a real site: adapt it to yours.
#PBS -N clipx
#PBS -l select=2:ncpus=96:ngpus=8:mpiprocs=1
#PBS -l walltime=24:00:00
#PBS -r y
#PBS -j oe
run=(model=vit_b32 data=laion400m 'data.shards=/scratch/laion400m/{00000..41407}.tar' run_dir=outputs/vit_b32)
limit_s=$((24 * 3600 - 600)) # PBS sends no signal before the walltime: stop and save ten minutes before it

cd "$PBS_O_WORKDIR" || exit
source ~/venv/bin/activate
mapfile -t hosts < "$PBS_NODEFILE" # one line for each chunk; this script runs on the first host
script="$PWD/clipx-$PBS_JOBID.sh"
clipx-sweep script torchrun nodes="${#hosts[@]}" tasks_per_node=8 host="${hosts[0]}" -- "${run[@]}" > "$script" || exit
for ((number = 1; number < ${#hosts[@]}; number++)); do
  pbsdsh -n "$number" -- bash "$script" "$number" &
done
timeout --signal=USR1 "$limit_s" bash "$script" 0 # a signal to one rank stops all
code=$?
wait
rm -f "$script"

# torchrun exits with 1 for any code of its ranks: the last event tells whether the run has saved after a signal.
last=$(grep -oE '"event": "(start|stopped|end)"' outputs/vit_b32/events.jsonl | tail -n 1)
if [[ "$last" == *stopped* ]]; then
  qsub "$PBS_O_WORKDIR/pbs.sh"
  exit 75
fi
[[ "$last" == *end* ]] && exit 0 # `timeout` reports 124 if the run ended after its signal
exit "$code"
