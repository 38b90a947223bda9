"""Limits of the cluster and states of its jobs, from sinfo, squeue and scontrol, and from sacct for jobs that these no
longer list."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from clipx.errors import ClipxError, require
from clipx_launch.slurm_spec import SlurmSpec

DEFAULT_ARRAY_SIZE = 1001  # SLURM's default of MaxArraySize
# States in which the accounting leaves a job whose end it missed.
_ACTIVE = ("PENDING", "RUNNING", "SUSPENDED", "REQUEUED")
_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")


class SlurmError(ClipxError):
    """A SLURM command failed or does not respond."""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Identical nodes of one partition."""

    partition: str
    default: bool
    count: int
    cpus: int
    memory_gb: float
    gpus: int
    minutes: int | None  # time limit of a job; None: no limit


def has_slurm() -> bool:
    """Returns whether this machine has SLURM's commands."""
    return shutil.which("squeue") is not None


def check_site(spec: SlurmSpec) -> None:
    """Raises ClipxError if no partition of this cluster can ever run the job."""
    require(
        shutil.which("sbatch") is not None,
        "hydra/launcher=clipx_slurm needs sbatch, which is not on PATH: launch on a SLURM host, or use clipx_local",
    )
    names = (spec.partition or "").split(",")
    nodes = _nodes()
    known = sorted({group.partition for group in nodes})
    for name in filter(None, names):
        require(name in known, f"hydra.launcher.partition={name} does not exist: choose one of {', '.join(known)}")
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
            f"hydra.launcher.{key}={wanted} is more than a node of {where} has: lower it to at most {maximum:g} {unit}",
        )
        able = [group for group in able if getattr(group, have) >= wanted]
    maximum = sum(group.count for group in able)
    require(
        spec.nodes <= maximum,
        f"hydra.launcher.nodes={spec.nodes} is more than {where} has: lower it to at most {maximum}",
    )
    limits_m = [group.minutes for group in able]
    longest = max(filter(None, limits_m), default=0)
    require(
        None in limits_m or spec.minutes <= longest,
        f"hydra.launcher.time={spec.time} is more than {where} allows: lower it to at most {longest}m",
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
    """Parses SLURM's days-hours:minutes:seconds. Returns minutes, or None for no limit."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return None  # infinite
    hours, minutes = ([0, 0, *map(int, parts)])[-3:-1]
    return 1440 * int(days or 0) + 60 * hours + minutes


def max_array_size() -> int:
    """Returns the largest number of tasks of a job array on this cluster (MaxArraySize)."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", run_slurm("scontrol", "show", "config"), re.M)
    return int(found[1]) if found else DEFAULT_ARRAY_SIZE


class Job(NamedTuple):
    """State of a job as SLURM names it, and the reason why it waits."""

    state: str
    reason: str = ""


def queued_jobs(user: int | None = None) -> dict[str, Job]:
    """Returns the pending and running jobs of a user, by default of this one, by id: 123 or 123_4."""
    user = os.getuid() if user is None else user
    lines = run_slurm("squeue", "--noheader", "--array", f"--user={user}", "--format=%i|%T|%r").splitlines()
    return {name: Job(*words) for name, *words in (line.split("|", 2) for line in lines)}


def reason_of(job: str, state: str) -> str:
    """Returns the reason of a point whose job has ended in this state without a result."""
    fix = ": raise hydra.launcher.mem_gb, or lower data.workers" if state == "OUT_OF_MEMORY" else ""
    return f"job {job} is {state.lower().replace('_', ' ')}{fix}"


def final_states(ids: Collection[str]) -> dict[str, str]:
    """Returns the final states of jobs that left the queue, of those that SLURM or its accounting still lists."""
    found: dict[str, str] = {}
    for job in {name.partition("_")[0] for name in ids}:
        try:
            lines = run_slurm("scontrol", "--oneliner", "show", "job", job).splitlines()
        except SlurmError:
            continue  # SLURM no longer lists it
        for line in lines:
            values = dict(part.split("=", 1) for part in line.split() if "=" in part)
            tasks = _task_ids(values.get("ArrayTaskId", ""))
            names = [f"{values['ArrayJobId']}_{task}" for task in tasks] or [values["JobId"]]
            found |= dict.fromkeys(names, values["JobState"])
    forgotten = [name for name in ids if name not in found]
    return {name: state for name, state in (found | _accounting_states(forgotten)).items() if name in ids}


def _accounting_states(ids: Collection[str]) -> dict[str, str]:
    """Returns the states of ended jobs from sacct. Empty on a cluster without accounting."""
    if not ids:
        return {}
    jobs = ",".join(sorted({name.partition("_")[0] for name in ids}))
    options = ("--allusers", "--allocations", "--noheader", "--parsable2", "--format=JobID,State")
    try:
        lines = run_slurm("sacct", *options, f"--jobs={jobs}").splitlines()
    except SlurmError:
        return {}
    return ended_states(lines)


def ended_states(lines: Collection[str]) -> dict[str, str]:
    """Returns the states of ended jobs by lines of sacct, `123_4|FAILED`.

    A line of an array, `123_[0-4]|CANCELLED by 0`, is of those tasks alone that have no line: it may still list tasks
    that have ended by themselves.
    """
    own, shared = dict[str, str](), dict[str, str]()
    for name, text in (line.split("|") for line in lines):
        job, _, tasks = name.partition("_")
        state = text.partition(" ")[0]  # drops the user of "CANCELLED by 0"
        if state not in _ACTIVE:
            names = [f"{job}_{task}" for task in _task_ids(tasks.strip("[]"))] or [name]
            (shared if "[" in tasks else own).update(dict.fromkeys(names, state))
    return shared | own


def _task_ids(text: str) -> list[int]:
    """Parses the array task ids of a job: `3`, or `0,2-4%2` for tasks that have not been split into separate jobs."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text.partition("%")[0])
    return [task for first, last in spans for task in range(int(first), int(last or first) + 1)]


def run_slurm(*command: str) -> str:
    """Runs a SLURM command with a timeout of 60 s. Returns its stdout. Raises SlurmError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]} does not respond ({error}): ask the administrators of the cluster") from None
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())
        raise SlurmError(f"{' '.join(command[:3])} failed: {output}")
    return done.stdout.strip()
