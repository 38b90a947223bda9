"""Limits of the cluster, states of its jobs and their usage, from SLURM's commands. submitit parses lists of jobs."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from clipx.errors import ClipxError
from clipx_launch.slurm_spec import SlurmSpec

DEFAULT_ARRAY_SIZE = 1001  # SLURM's default of MaxArraySize
_MOST_JOBS = 1000  # in one query: the kernel limits an argument to 128 KiB
_UNKNOWN_ENERGY = 1 << 62  # SLURM's marks for no value are larger
_ENDED = frozenset(  # GONE: of a job that SLURM no longer lists
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED GONE NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)

# Variables of the submitting process if it runs in a job itself: the submitted job must not inherit them.
_JOB_VARIABLE = re.compile(r"(SLURM|SBATCH|SRUN|PMI|PMIX|OMPI)_(?!CONF$).*")
_RANK_VARIABLE = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(MASTER)_(ADDR|PORT)|TORCHELASTIC_.*")


class SlurmError(ClipxError):
    """A SLURM command failed or does not respond."""


class Job(NamedTuple):
    """State of a job as SLURM names it, and the reason why it waits."""

    state: str
    reason: str = ""

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    def failure(self, name: str) -> str:
        """Returns the reason of a point whose job, of this name, has ended in this state without a result."""
        fix = ": raise hydra.launcher.mem_gb, or lower data.workers" if self.state == "OUT_OF_MEMORY" else ""
        return f"job {name} is {self.state.lower().replace('_', ' ')}{fix}"


def has_slurm() -> bool:
    """Returns whether this machine has SLURM's commands."""
    return shutil.which("squeue") is not None


def queued_jobs(user: int | None = None) -> dict[str, Job]:
    """Returns the waiting and running jobs of a user, by default of this one, by id: 123 or 123_4."""
    return {name: job for name, job in _listed_jobs(user).items() if not job.ended}


def find_jobs(ids: Collection[str], user: int | None = None) -> dict[str, Job]:
    """Returns the waiting and running jobs of a user, and those of `ids` that have ended, as far as SLURM or its
    accounting still lists them."""
    jobs = _listed_jobs(user)
    forgotten = [name for name in ids if name not in jobs]
    return jobs | {name: job for name, job in _accounted_jobs(forgotten).items() if name in forgotten}


def _listed_jobs(user: int | None) -> dict[str, Job]:
    """Returns the jobs of a user that SLURM lists: also those that ended in the last minutes (MinJobAge)."""
    of_user = f"--user={os.getuid() if user is None else user}"
    return parse_jobs(run_slurm("squeue", "--noheader", "--array", "--states=all", of_user, "--format=%i|%T|%r"))


def _accounted_jobs(ids: Iterable[str]) -> dict[str, Job]:
    """Returns jobs that have ended from sacct. Empty on a cluster without accounting."""
    jobs = ",".join(sorted({name.partition("_")[0] for name in ids}))
    if not jobs:
        return {}
    try:
        text = run_slurm("sacct", "--allusers", "--noheader", "--parsable2", "--format=JobID,State", f"--jobs={jobs}")
    except SlurmError:
        return {}
    # A job whose end the accounting missed remains in another state.
    return {name: job for name, job in parse_jobs(text).items() if job.ended}


def parse_jobs(text: str) -> dict[str, Job]:
    """Parses lines `123_4|RUNNING|reason`.

    A line of an array, `123_[0-4]|CANCELLED by 0`, is of those tasks alone that have no line: sacct may still list
    tasks in it that have ended by themselves.
    """
    from submitit.slurm.slurm import SlurmInfoWatcher  # imported late: 80 ms

    arrays_first = sorted(text.splitlines(), key=lambda line: "[" not in line)
    rows = SlurmInfoWatcher().read_info("\n".join(["JobID|State|Reason", *arrays_first]))
    # Drops the user of "CANCELLED by 0".
    return {name: Job(row["State"].partition(" ")[0], row.get("Reason", "")) for name, row in rows.items()}


class JobStart(NamedTuple):
    """One start of a job and what it was allocated. A requeued job has several. Times are in seconds since 1970."""

    job: str
    state: str
    start: float
    end: float  # infinite while it runs
    seconds: float  # until now while it runs; without the time in which it was suspended
    gpus: int
    cpus: int
    joules: int = 0  # 0 if the cluster does not measure energy


def accounted_starts(ids: Collection[str]) -> list[JobStart]:
    """Returns all starts of jobs from sacct. Raises SlurmError on a cluster without accounting."""
    query = "sacct --allusers --duplicates --allocations --parsable2 --noheader".split()
    columns = "--format=JobID,State,Start,End,ElapsedRaw,AllocTRES,ConsumedEnergyRaw"
    names, found = sorted(ids), list[JobStart]()
    for first in range(0, len(names), _MOST_JOBS):
        jobs = f"--jobs={','.join(names[first : first + _MOST_JOBS])}"
        found += parse_starts(run_slurm(*query, columns, jobs, SLURM_TIME_FORMAT="%s"))
    return found


def parse_starts(text: str) -> list[JobStart]:
    """Parses lines `123_4|REQUEUED|1700000000|1700003600|3600|cpu=8,gres/gpu=2,node=1|JOULES`.

    A job that has not started has no allocation, and is left out. JOULES may be empty.
    """
    lines = [line.split("|") for line in text.splitlines()]
    return [
        JobStart(
            job=job,
            state=state.partition(" ")[0],  # drops the user of "CANCELLED by 0"
            start=float(start),
            end=float(end) if end.isdigit() else math.inf,
            seconds=float(seconds),
            gpus=_gpus(allocated),
            cpus=sum(map(int, re.findall(r"\bcpu=(\d+)", allocated))),
            joules=int(joules) if joules.isdigit() and int(joules) < _UNKNOWN_ENERGY else 0,
        )
        for job, state, start, end, seconds, allocated, joules in lines
        if allocated and start.isdigit()
    ]


def _gpus(allocated: str) -> int:
    """Returns the GPUs in SLURM's `gres/gpu=2,gres/gpu:a100=2`. The numbers by type count the same devices again."""
    counts = re.findall(r"\bgres/gpu(:[^=,]+)?=(\d+)", allocated)
    return sum(int(number) for kind, number in counts if not kind) or sum(int(number) for _, number in counts)


def max_array_size() -> int:
    """Returns the largest number of tasks of a job array on this cluster (MaxArraySize)."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", run_slurm("scontrol", "show", "config"), re.M)
    return int(found[1]) if found else DEFAULT_ARRAY_SIZE


def time_limit(partitions: str | None) -> int | None:
    """Returns the longest time limit of some partitions, or of the default one, in minutes. None: no limit."""
    lines = [line.split("|") for line in run_slurm("sinfo", "--noheader", "--format=%P|%l").splitlines()]
    chosen = partitions.split(",") if partitions else [name for name, _ in lines if name.endswith("*")]
    limits = [minutes_of(limit) for name, limit in lines if name in chosen or name.removesuffix("*") in chosen]
    return None if None in limits else max(filter(None, limits), default=None)


def minutes_of(text: str) -> int | None:
    """Parses SLURM's days-hours:minutes:seconds. Returns minutes, or None for no limit."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return None  # infinite
    hours, minutes = ([0, 0, *map(int, parts)])[-3:-1]
    return 1440 * int(days or 0) + 60 * hours + minutes


def run_slurm(*command: str, **variables: str) -> str:
    """Runs a SLURM command for at most 60 s, with further `variables`. Returns its stdout. Raises SlurmError."""
    done = slurm_process(*command, **variables)
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())
        raise SlurmError(f"{' '.join(command[:3])} failed: {output}")
    return done.stdout.strip()


def slurm_process(*command: str, text: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a SLURM command, with `text` as its input, for at most 60 s. Raises SlurmError if it does not respond."""
    env = {**os.environ, **variables}
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]} does not respond ({error}): ask the administrators of the cluster") from None


@contextmanager
def outside_job(spec: SlurmSpec) -> Iterator[None]:
    """Removes the variables of this process's job and rank, for sbatch passes its environment to the job.

    Also the site's SBATCH_EXPORT, which would take precedence over the script's option, if that follows from it.
    """
    own = [*job_variables(os.environ), *(["SBATCH_EXPORT"] if spec.pass_environment else [])]
    hidden = {name: os.environ.pop(name) for name in own if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def job_variables(names: Collection[str]) -> list[str]:
    """Returns the variables among `names` that describe the job or the rank of a process."""
    in_job = "SLURM_JOB_ID" in names
    return [name for name in names if _RANK_VARIABLE.fullmatch(name) or (in_job and _JOB_VARIABLE.fullmatch(name))]
