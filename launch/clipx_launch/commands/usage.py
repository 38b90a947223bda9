"""Prints the hours of GPUs and CPUs that runs used: by run, by state of their starts, and lost to restarts.

A start is one of a SLURM job, as sacct lists it. One that sacct does not list is read from events.jsonl: it lasts from
its `start` event to its last line, and a rank counts as one GPU, or as one CPU if it trains on the CPU.

Lost is the time of a start after its last line of a step that the next one continued, and of each later start until its
`start` event. A start of a job without a `start` event is lost as a whole if another followed.

Energy is the ConsumedEnergyRaw of a site with an acct_gather_energy plug-in. It has not been tested on a device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clipx.report.console import stdout_console, text_table
from clipx.report.run_history import FINISHED, History, Start
from clipx_launch.cluster import JobStart, SlurmError, accounted_starts
from clipx_launch.commands.run import RunFiles
from clipx_launch.commands.runs import note, runs_in

if TYPE_CHECKING:
    from rich.table import Table

_TEXTS = ("run", "overrides", "state")
_NUMBERS = ("starts", "hours", "gpu_hours", "cpu_hours", "lost_gpu_hours", "lost_cpu_hours", "kwh")


class Used(NamedTuple):
    """A start of a run, and the seconds of it that were lost."""

    start: JobStart
    lost: float


def show(folders: Sequence[Path], as_json: bool) -> None:
    """Prints the GPU-hours of runs, also by state, and those lost to restarts. Raises ClipxError."""
    runs = runs_in(folders)
    accounted = _accounted(set[str]().union(*map(_jobs, runs)))
    used = [_used_by(run, accounted) for run in runs]
    rows = [_facts(run, own) for run, own in zip(runs, used, strict=True)]
    every = [one for own in used for one in own]
    states = sorted({one.start.state for one in every})
    by_state = [{"state": state, **_sums([one for one in every if one.start.state == state])} for state in states]
    total = _sums(every)
    if as_json:
        print(json.dumps({"time": time.time(), "runs": rows, "total": total, "states": by_state}, indent=1))
        return
    stdout_console().print(_table([*rows, {"run": "total", **total}], sections=[len(rows) - 1]))
    if every:
        stdout_console().print(_table(by_state))


def _facts(run: RunFiles, used: Sequence[Used]) -> dict[str, Any]:
    return {"run": run.name, "folder": str(run.folder), "overrides": run.varied, "state": run.state, **_sums(used)}


def _jobs(run: RunFiles) -> set[str]:
    """Returns the ids of all SLURM jobs of a run."""
    begun = set() if run.point is None else {path.name for path in run.point.begun_jobs}
    return begun if run.job is None else begun | {run.job}


def _accounted(ids: set[str]) -> list[JobStart]:
    """Returns the starts of jobs that sacct lists. Empty without accounting, which a note says."""
    try:
        return accounted_starts(ids)
    except SlurmError as error:
        note(f"{error}: the usage is counted from the events of the runs")
        return []


def _used_by(run: RunFiles, accounted: Sequence[JobStart]) -> list[Used]:
    """Returns the starts of a run in their order: those of its jobs in `accounted`, and the others from its events."""
    jobs, starts = _jobs(run), History(run.rows, run.events).starts
    listed = [start for start in accounted if start.job in jobs]
    unlisted = [start for start in starts if not any(_is_in(start.event["time"], job) for job in listed)]
    recorded = [_recorded(run, start, start is starts[-1]) for start in unlisted]
    found = sorted([*listed, *recorded], key=lambda start: start.start)
    return [Used(start, lost) for start, lost in zip(found, _lost(run, found), strict=True)]


def _is_in(seconds: float, start: JobStart) -> bool:
    return start.start <= seconds <= start.end + 1  # sacct's are whole seconds


def _recorded(run: RunFiles, start: Start, is_last: bool) -> JobStart:
    """Returns a start from events. Earlier versions recorded no device."""
    event, ranks = start.event, start.event.get("world")
    ranks = ranks if type(ranks) is int and 0 < ranks < 1 << 31 else 1
    on_gpus = event["device"] != "cpu" if "device" in event else any("train/device_memory_gb" in r for r in run.rows)
    # A last start without a record of its end may still be running.
    reason = run.state.value if is_last and start.reason == FINISHED else start.reason
    state = reason.partition(" at step ")[0].partition(" after step ")[0]
    gpus, cpus = (ranks, 0) if on_gpus else (0, ranks)
    return JobStart("", state, float(event["time"]), event["time"] + start.seconds, start.seconds, gpus, cpus)


def _lost(run: RunFiles, starts: Sequence[JobStart]) -> list[float]:
    """Returns the lost seconds of each start. `starts`: all of the run, in their order."""
    begun = [event for event in run.events if event["event"] == "start"]
    marks = [(row["seconds"], row["step"]) for row in run.rows]
    marks += [(event["time"], event.get("step", 0)) for event in run.events if event["event"] in ("stopped", "end")]
    lost, before, began = [0.0] * len(starts), None, 0.0  # `before`: number of the last one with a `start` event
    for number, start in enumerate(starts):
        event = next((event for event in begun if _is_in(event["time"], start)), None)
        if event is None:
            lost[number] = start.seconds if number + 1 < len(starts) else 0.0
            continue
        if before is not None:
            kept = [at for at, step in marks if began <= at < event["time"] and step <= event.get("step", 0)]
            lost[before] += starts[before].end - max(kept, default=began)
            lost[number] += event["time"] - start.start
        before, began = number, event["time"]
    return [min(max(seconds, 0.0), start.seconds) for seconds, start in zip(lost, starts, strict=True)]


def _sums(used: Sequence[Used]) -> dict[str, float | None]:
    """Returns the sums over starts, in hours. None for CPU-hours and kWh that are not known."""
    return {
        "starts": len(used),
        "hours": sum(start.seconds for start, _ in used) / 3600,
        "gpu_hours": sum(start.seconds * start.gpus for start, _ in used) / 3600,
        "cpu_hours": sum(start.seconds * start.cpus for start, _ in used) / 3600 or None,
        "lost_gpu_hours": sum(lost * start.gpus for start, lost in used) / 3600,
        "lost_cpu_hours": sum(lost * start.cpus for start, lost in used if not start.gpus) / 3600,
        "kwh": sum(start.joules for start, _ in used) / 3.6e6 or None,
    }


def _table(rows: Sequence[dict[str, Any]], sections: Sequence[int] = ()) -> Table:
    """Returns a table without empty columns."""
    columns = [name for name in (*_TEXTS, *_NUMBERS) if any(row.get(name) for row in rows)]
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    return text_table(list(map(_title, columns)), cells, right=list(map(_title, _NUMBERS)), sections=sections)


def _title(name: str) -> str:
    return name.replace("gpu_", "GPU-").replace("cpu_", "CPU-").replace("kwh", "kWh").replace("_", " ")


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={text}" for key, text in value.items())
    return "" if not value else f"{value:,.2f}" if isinstance(value, float) else str(value)
