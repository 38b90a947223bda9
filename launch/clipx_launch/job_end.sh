# End of a job's script: requeues the job, retries it, or ends it with a result. An exit code cannot report that a run
# has saved, because srun ends the other tasks when the first one fails: rank 0 writes the file `requeue`. This part
# needs no Python, which may exist only in the job's container.

plain() { # TEXT: as a JSON string needs it
  printf '%s' "$1" | LC_ALL=C tr -d '"\\\000-\037\177-\377' | head -c 500
}
result() { # STATE CODE ERROR
  printf '{"state": "%s", "exit_code": %d, "error": "%s"}\n' "$1" "$2" "$(plain "$3")" > "$files/result.json"
}
has_result() { # STATE: whether a rank has written one of this state
  [[ -e "$files/result.json" && "$(< "$files/result.json")" == '{"state": "'"$1"* ]]
}
error_of_result() {
  if [[ -e "$files/result.json" ]]; then sed -n 's/.*"error": "\(.*\)"}$/\1/p' "$files/result.json"; fi
}
note() { # EVENT MESSAGE: in the log of the job, of rank 0 or its node, and in events.jsonl
  printf '%s\n' "$2" | tee -a "$logs/$job.0.log"
  printf '{"time": %s, "event": "%s", "job": "%s", "message": "%s"}\n' "$(date +%s)" "$1" "$job" "$(plain "$2")" \
    >> "$point/events.jsonl"
}
lines() { # FILE START: number of lines, of those that start so
  if [[ -e "$1" ]]; then grep -c "^${2:-}" "$1"; else echo 0; fi
}
shielded() { # COMMAND: SLURM's SIGTERM, which may come before SLURM's answer, does not end it
  (trap '' TERM; exec "$@")
}
is_preempted() {
  [[ "$(shielded scontrol --oneliner show job "$job")" =~ PreemptTime=[0-9] ]]
}
alert() { # STATE REASON: runs the user's command at the end of a point
  if [[ -z "$on_end" ]]; then return; fi
  CLIPX_STATE="$1" CLIPX_REASON="$2" CLIPX_FOLDER="$point" shielded timeout 60 bash -c "$on_end" ||
    echo "hydra.launcher.on_end has failed (exit code $?)" >&2
}
alert_result() {
  alert "$(sed -n 's/^{"state": "\([a-z]*\)".*/\1/p' "$files/result.json")" "$(error_of_result)"
}
wait_for_end() { # until SLURM ends this script, which must not end as completed before
  if (( ended )); then exit "$code"; fi # SLURM has ended the job, and kills this script only after KillWait
  sleep 3600 &
  wait "$!" # a signal interrupts it
  exit "$code"
}
requeue() { # EVENT MESSAGE NODES: does not return, unless SLURM refuses. The nodes are excluded.
  note "$1" "$2"
  if ! shielded scontrol requeue "$job"; then
    note requeue_refused "SLURM refused to requeue the job: resume the sweep with clipx-sweep resume"
    return
  fi
  if [[ -n "${3:-}" ]]; then # SLURM accepts nodes only for a job that waits
    local others="" try
    if [[ "$(shielded scontrol --oneliner show job "$job")" =~ ' ExcNodeList='([^' (']+) ]]; then
      others="${BASH_REMATCH[1]}"
    fi
    for try in 1 2 3 4; do
      shielded scontrol update "JobId=$job" "ExcNodeList=${others:+$others,}$3" && break
      sleep 0.5
    done
  fi
  wait_for_end
}
newest_checkpoint() {
  local newest=none manifest
  for manifest in "$point"/checkpoints/step-????????/MANIFEST.json; do
    if [[ -e "$manifest" ]]; then newest="${manifest%/MANIFEST.json}" newest="${newest##*/}"; fi
  done
  echo "$newest"
}
requeue_stopped() { # REASON: requeues a run that a signal stopped, unless time limits do that again and again
  local newest cause=limit key=max_num_timeout most="$max_num_timeout" number line same=0 message
  newest="$(newest_checkpoint)"
  if (( ended )) || is_preempted; then cause=preemption key=max_preemption most="$max_preemption"; fi
  number=$(( $(lines "$files/requeues" "$cause ") + 1 ))
  if [[ $cause == limit && -e "$files/requeues" ]]; then # preemptions are no stalls
    while read -r line; do
      if [[ "$line" == "limit $newest" ]]; then (( ++same )); elif [[ "$line" == limit* ]]; then same=0; fi
    done < "$files/requeues"
  fi
  if [[ -n "$most" ]] && (( number > most )); then
    echo "stopped${saved:+ and saved}, but not requeued (hydra.launcher.$key=$most)" >&2
    code=$stopped
    has_result '' || result stopped "$code" "$1"
  elif (( same >= max_stalled )); then
    code=1
    result failed 1 "requeued $same times without a newer checkpoint (newest: $newest; $1): if starting takes longer than hydra.launcher.timeout_min less hydra.launcher.signal_delay_s, raise the time limit"
    note requeue_stopped "not requeued: $same requeues without a newer checkpoint (newest: $newest)"
  else
    has_result '' || result stopped "$stopped" "$1"
    echo "$cause $newest" >> "$files/requeues"
    message="requeue $number${most:+ of at most $most}"
    if [[ $cause == preemption ]]; then message="preemption $number${most:+ of at most $most}, requeued"; fi
    requeue requeued "$message: $1; newest checkpoint: $newest"
    code=$stopped
  fi
}
retry() { # REASON NODES: requeues a run that lost a rank, at most max_retry times
  local number=$(( $(lines "$files/retries") + 1 ))
  if (( number > max_retry )); then return; fi
  printf '%s\n' "$1" >> "$files/retries"
  local message="retry $number of at most $max_retry${2:+, without $2}: $1" failed
  failed="$(< "$files/result.json")"
  result stopped "$stopped" "$message"
  requeue retried "$message" "$2"
  printf '%s\n' "$failed" > "$files/result.json"
}

reason="" saved="" killed="" lost="" nodes=""
if [[ -e "$files/requeue" ]]; then reason="$(< "$files/requeue")"; fi
if [[ "$reason" == saved ]]; then saved=1 reason="a signal stopped the run, which has saved"; fi
if (( ended )) && [[ -z "$reason" ]] && ! has_result ''; then reason="SIGTERM ended the run before it could save"; fi
if (( ended )) && ! { [[ -n "$reason" ]] && is_preempted; }; then
  if [[ -n "$on_end" && "$(shielded scontrol --oneliner show job "$job")" =~ JobState=(CANCELLED|TIMEOUT) ]]; then
    alert stopped "${BASH_REMATCH[1]}${reason:+: $reason}"
  fi
  exit "$code" # by scancel, a time limit, or SLURM's own requeue: from here on, `ended` is by a preemption
fi

if [[ -e "$files/cancel" ]]; then
  has_result '' || result stopped 130 "cancelled${reason:+: $reason}"
  alert_result
  shielded scancel "$job" && wait_for_end
fi

if [[ -n "$missing" ]]; then
  code=2
  result failed 2 "hydra.launcher.pass_environment:$missing not in the environment of the job: export it before sbatch"
fi
# The first task that srun reports is the cause: srun then ends the others.
touch "$files/srun.log"
first="$(sed -n 's/^srun: error: \([^ ]*: tasks\{0,1\} [0-9,-]*: .*\)$/\1/p' "$files/srun.log" | head -n 1)"
case "$first" in
  "" | *": Exited with exit code "* | *": Terminated" | *": User defined signal "*) ;;
  *) killed="$(plain "$first")" nodes="${first%%:*}" ;;
esac
if grep -qiE 'oom[-_]kill|out of memory|exceeded memory limit' "$files/srun.log"; then # on any node it would be again
  error="$(error_of_result)" nodes=""
  killed="out of memory (${error:-${first:-a task was killed}}): raise hydra.launcher.mem_gb${mem_gb:+=$mem_gb}, or lower data.workers"
  if [[ -z "$saved" ]] && has_result failed; then rm "$files/result.json"; fi
fi
if has_result finished; then
  killed="" reason=""
elif [[ -z "$saved" ]]; then
  if has_result failed; then
    killed="" reason=""
  elif ! has_result '' && [[ -n "$killed" ]]; then
    reason=""
    result failed "$code" "$killed"
  elif ! has_result '' && [[ -e "$files/lost.json" ]]; then
    reason="" lost=1
    mv "$files/lost.json" "$files/result.json"
  elif [[ -z "$reason" ]] && (( code == 138 || code == 140 || code == 143 )); then # SIGUSR1, SIGUSR2, SIGTERM
    reason="a signal stopped the run before Python could handle it"
  fi
fi

if [[ -n "$reason" ]]; then
  requeue_stopped "$reason"
elif [[ -n "$killed" ]]; then
  retry "$killed" "$nodes"
elif [[ -n "$lost" ]] || has_result 'failed", "exit_code": 70,'; then # 70: by the watchdog
  error="$(error_of_result)"
  retry "$error" "$(sed -n 's/^rank [0-9]* (host \([^,)" ]*\), pid [0-9]*) sent no heartbeat.*/\1/p' <<< "$error")"
fi
if ! has_result ''; then
  (( code )) || code=1
  error="no rank reported an error${first:+ ($first)}: see the logs"
  unable="$(sed -n 's/^srun: error: \(Unable to .*\)$/\1/p' "$files/srun.log" | tail -n 1)"
  result failed "$code" "${unable:+srun could not start the run: }${unable:-$error}"
fi
alert_result
# srun may return the code of a rank that was ended after another one failed. The job returns the code of the first.
(( code )) && [[ "$(< "$files/result.json")" =~ '"exit_code": '([1-9][0-9]*) ]] && code="${BASH_REMATCH[1]}"
exit "$code"
