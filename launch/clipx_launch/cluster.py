"""What the cluster says about itself and its jobs: sinfo, squeue, scontrol; of old jobs sacct, where that answers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from clipx.errors import ClipxError, require
from clipx_launch.options import SlurmSpec

DEFAULT_ARRAY_SIZE = 1001  # SLURM's default of MaxArraySize
_ACTIVE = ("PENDING", "RUNNING", "SUSPENDED", "REQUEUED")  # of a job that is gone: the accounting missed its end
_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")


class SlurmError(ClipxError):
    """SLURM does not answer, or refuses."""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of one partition that are alike."""

    partition: str
    default: bool
    count: int
    cpus: int
    memory_gb: float
    gpus: int
    minutes: int | None  # that a job may take at most; None: any


def check_site(spec: SlurmSpec) -> None:
    """Raises ClipxError, one line, where this cluster can never run the job."""
    require(
        shutil.which("sbatch") is not None,
        "hydra/launcher=clipx_slurm needs sbatch, which is not on PATH: launch where SLURM is, or use clipx_local",
    )
    names = (spec.partition or "").split(",")
    nodes = _nodes()
    known = sorted({group.partition for group in nodes})
    for name in filter(None, names):
        require(name in known, f"hydra.launcher.partition={name} is not there: choose one of {', '.join(known)}")
    able = [group for group in nodes if (group.partition in names if spec.partition else group.default)]
    where = f"partition {spec.partition or next((group.partition for group in able), '(default)')}"
    cpus = spec.tasks_per_node * spec.cpus_per_task
    limits = (
        ("gpus_per_node", spec.gpus_per_node, "gpus", "GPUs"),
        ("tasks_per_node x cpus_per_task", cpus, "cpus", "CPUs"),
        ("mem_gb", spec.mem_gb or 0, "memory_gb", "GB"),
    )
    for key, wanted, have, unit in limits:
        maximum = max((getattr(group, have) for group in able), default=0)
        require(
            wanted <= maximum,
            f"hydra.launcher.{key}={wanted} is more than a node of {where} has: {maximum:g} {unit} at most",
        )
        able = [group for group in able if getattr(group, have) >= wanted]
    maximum = sum(group.count for group in able)
    require(spec.nodes <= maximum, f"hydra.launcher.nodes={spec.nodes} is more than {where} has: {maximum} such nodes")
    limits_m = [group.minutes for group in able]
    longest = max(filter(None, limits_m), default=0)
    require(
        None in limits_m or spec.minutes <= longest,
        f"hydra.launcher.time={spec.time} is more than {where} allows: {longest}m at most",
    )


def _nodes() -> list[NodeGroup]:
    found = []
    for line in run_slurm("sinfo", "--noheader", "--exact", "--format=%P|%D|%c|%m|%G|%l").splitlines():
        partition, count, cpus, memory, gres, limit = line.split("|")
        found.append(
            NodeGroup(
                partition.removesuffix("*"),
                partition.endswith("*"),
                int(count),
                int(cpus),
                int(memory) / 1024,
                sum(map(int, _GPUS.findall(gres))),
                _minutes(limit),
            )
        )
    return found


def _minutes(text: str) -> int | None:
    """Of SLURM's days-hours:minutes:seconds."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return None  # infinite
    hours, minutes = ([0, 0, *map(int, parts)])[-3:-1]
    return 1440 * int(days or 0) + 60 * hours + minutes


def max_array_size() -> int:
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", run_slurm("scontrol", "show", "config"), re.M)
    return int(found[1]) if found else DEFAULT_ARRAY_SIZE


class Job(NamedTuple):
    state: str  # SLURM's word
    reason: str = ""


def queued_jobs(user: int | None = None) -> dict[str, Job]:
    """The jobs of a user, by default this one, that wait or run, by 123 or 123_4."""
    user = os.getuid() if user is None else user
    lines = run_slurm("squeue", "--noheader", "--array", f"--user={user}", "--format=%i|%T|%r").splitlines()
    return {name: Job(*words) for name, *words in (line.split("|", 2) for line in lines)}


def final_states(ids: Collection[str]) -> dict[str, str]:
    """How jobs that left the queue ended, of those that SLURM, or else its accounting, still knows."""
    found: dict[str, str] = {}
    for job in {name.partition("_")[0] for name in ids}:
        try:
            lines = run_slurm("scontrol", "--oneliner", "show", "job", job).splitlines()
        except SlurmError:
            continue  # forgotten
        for line in lines:
            values = dict(part.split("=", 1) for part in line.split() if "=" in part)
            tasks = _task_ids(values.get("ArrayTaskId", ""))
            names = [f"{values['ArrayJobId']}_{task}" for task in tasks] or [values["JobId"]]
            found |= dict.fromkeys(names, values["JobState"])
    forgotten = [name for name in ids if name not in found]
    return {name: state for name, state in (found | _accounting_states(forgotten)).items() if name in ids}


def _accounting_states(ids: Collection[str]) -> dict[str, str]:
    """What sacct says of jobs that ended; nothing where there is no accounting."""
    if not ids:
        return {}
    jobs = ",".join(sorted({name.partition("_")[0] for name in ids}))
    options = ("--allusers", "--allocations", "--noheader", "--parsable2", "--format=JobID,State")
    try:
        lines = run_slurm("sacct", *options, f"--jobs={jobs}").splitlines()
    except SlurmError:
        return {}
    found: dict[str, str] = {}
    for name, text in (line.split("|") for line in lines):
        job, _, tasks = name.partition("_")
        state = text.partition(" ")[0]  # of "CANCELLED by 0"
        if state not in _ACTIVE:
            found |= dict.fromkeys([f"{job}_{task}" for task in _task_ids(tasks.strip("[]"))] or [name], state)
    return found


def _task_ids(text: str) -> list[int]:
    """Of `3`, or of tasks that were never split into jobs of their own: `0,2-4%2`."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text.partition("%")[0])
    return [task for first, last in spans for task in range(int(first), int(last or first) + 1)]


def run_slurm(*command: str) -> str:
    """Runs a command of SLURM's. Returns what it prints. Raises SlurmError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]} does not answer ({error}): ask whoever runs the cluster") from None
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())
        raise SlurmError(f"{' '.join(command[:3])} failed: {output}")
    return done.stdout.strip()
