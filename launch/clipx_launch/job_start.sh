# Start of a job's script, before `setup`. `points`: folders of the points. Each holds its configuration and logs in
# .launch, and the files of this job in .launch/JOB.
: "${SLURM_JOB_ID:?submit this script by sbatch}"
point="${points[${SLURM_ARRAY_TASK_ID:-0}]}"
job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
files="$point/.launch/$job" logs="$point/.launch/logs"
ended=0
trap 'ended=1' TERM # SLURM ends the job: this script continues until the run has saved
(( ${SLURM_RESTART_COUNT:-0} )) || rm -rf "$files"
mkdir -p "$files" || exit
rm -f "$files"/{requeue,result.json,lost.json,srun.log}
