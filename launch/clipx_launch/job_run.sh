# Middle of a job's script: starts the ranks by srun, again while it cannot start them. `worker`: the command of a rank.
described=() # each task of an array has a point of its own
if [[ "$describes" == *name* ]]; then described+=("Name=${sweep##*/}${point#"$sweep"}"); fi
if [[ "$describes" == *comment* ]]; then described+=("Comment=$point"); fi
if (( ${#described[@]} )); then timeout 10 scontrol update "JobId=$job" "${described[@]}" &> /dev/null; fi
export SLURM_EXPORT_ENV=ALL # srun passes on these variables, whatever sbatch passed to this script
if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then
  export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # from SLURM 22.05 on srun does not inherit it
fi
max_tries=10 # in 275 s and the time that srun waits for the controller
code=0 tries=0 missing=""
for name in "${pass_environment[@]}"; do
  [[ -v $name ]] || missing+=" $name"
done

until [[ -e "$files/cancel" || -n "$missing" ]] || (( ended )); do
  (
  trap : TERM
  srun --kill-on-bad-exit=1 --unbuffered --open-mode=append --output="$logs/$job.%t.log" "${srun_args[@]}" \
    "${worker[@]}" --job "$job" "$point" 2>&1 | (trap '' TERM; exec tee "$files/srun.log" >&2)
  exit "${PIPESTATUS[0]}"
  ) &
  run=$!
  wait "$run"
  code=$?
  while (( ended )) && [[ ! -e "$files/requeue" && ! -e "$files/result.json" ]] && kill -0 "$run" 2> /dev/null; do
    sleep 0.2
  done
  # srun could not start a rank, as when the controller is away for a while
  if (( ! code || ++tries > max_tries )) || [[ -e "$files/requeue" || -e "$files/result.json" ]] ||
    ! grep -q '^srun: error: Unable to ' "$files/srun.log"; then
    break
  fi
  echo "srun could not start the run: try $tries of $max_tries in $((5 * tries)) s" >&2
  sleep $((5 * tries)) &
  wait "$!"
done
