"""Rank, world size and rendezvous endpoint of this process, from the launcher's environment variables.

The innermost launcher that started several processes is used, in this order: torchrun or any other that sets RANK and
WORLD_SIZE; submitit's local executor; MPI; an srun step, which submitit also uses on SLURM.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from clipx.errors import ConfigError, require
from clipx.escape import escaped

_PORTS = range(15_000, 30_000)  # below the ephemeral ports of operating systems
_DEFAULT_PORT = 29_500  # torch's default, for processes of one host without a job number
_FIRST_RESERVED_STEP = 0xFFFF_FFF0  # SLURM step numbers from here on: batch script, shell of an allocation
_LOCALHOST = "127.0.0.1"
_NUMBER = re.compile("[0-9]{1,10}")
_MOST_HOSTS = 1 << 16
_SHOWN = 60  # characters of a value in an error

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """Rank and rendezvous endpoint of one of `world` processes.

    If `world` is 1, all other fields have their defaults.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # among the ranks of its host
    host: str = ""  # of the rendezvous store, usually rank 0's
    port: int = 0
    job: str = ""  # distinguishes this job from others at the same port
    agent_store: bool = False  # torchrun's agent serves the store, not rank 0
    hosts: tuple[str, ...] = ()  # of all ranks, in no particular order; empty if unknown

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Launcher:
    """Environment variables of a launcher. Of several names for one value, the first that is set is used."""

    name: str
    rank: str
    world: str
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...] = ()


_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_SUBMITIT = _Launcher(
    "submitit's local executor",
    "SUBMITIT_LOCAL_GLOBALID",
    "SUBMITIT_LOCAL_NTASKS",
    ("SUBMITIT_LOCAL_LOCALID",),
    ("SUBMITIT_LOCAL_NTASKS",),  # it starts processes on one host only
)
_MPI = (
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(  # MPICH, Intel MPI, Cray MPICH
        "MPI", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    ),
)
_SRUN = _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",))


def read_launch_env(env: Mapping[str, str] = os.environ) -> LaunchEnv:
    """Reads the variables of the launcher that started this process.

    Raises ConfigError if they are incomplete, not numbers, or contradictory.
    """
    found = _detect(env)
    if found is None:
        return LaunchEnv()
    launcher, rank, world = found
    host, port = _endpoint(env, launcher, world)
    return LaunchEnv(
        rank=rank,
        world=world,
        local_rank=_local_rank(env, launcher, rank),
        host=host,
        port=port,
        job=_job_id(env, launcher),
        agent_store=launcher is _TORCHRUN and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        hosts=expand_nodelist(env.get("SLURM_STEP_NODELIST", "")) if launcher is _SRUN else (),
    )


def allocated_gpus(env: Mapping[str, str] = os.environ) -> int:
    """Returns the number of GPUs on this node that SLURM has given to the job. 0: none, or no job."""
    text = env.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else 0


def rank_or_none(env: Mapping[str, str] = os.environ) -> int | None:
    """Returns this process's rank for log lines, or None for a single process or an invalid environment."""
    return rank_and_world(env)[0]


def rank_and_world(env: Mapping[str, str] = os.environ) -> tuple[int | None, int]:
    """Returns this process's rank and the number of ranks, (None, 1) as `rank_or_none`."""
    with contextlib.suppress(ConfigError):
        if found := _detect(env):
            return found[1:]
    return None, 1


def _detect(env: Mapping[str, str]) -> tuple[_Launcher, int, int] | None:
    """Returns the launcher, the rank and the world size, or None for a single process.

    A world size of 1 is skipped unless it is torchrun's: such variables may be left over, or of an outer launcher.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in env
    for launcher in (_TORCHRUN, _SUBMITIT, *_MPI, _SRUN):
        if launcher is _SRUN and not _in_srun_step(env):
            continue
        rank, world = _rank_and_world(env, launcher)
        if world > 1 and launcher is _TORCHRUN and not by_torchrun and _in_srun_step(env):
            tasks = _integer(env, _SRUN.world)
            require(
                world >= tasks,
                f"WORLD_SIZE={world} but srun started SLURM_STEP_NUM_TASKS={tasks} tasks: unset RANK and WORLD_SIZE "
                "if they are stale, or set them for each task",
            )
        if world > 1:
            return launcher, rank, world
        if by_torchrun:
            return None
    return None


def node_name(env: Mapping[str, str] = os.environ) -> str:
    """Returns SLURM's name of this host if there is one, else the host name of the system."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(usable_cores())


def usable_cores() -> list[int]:
    """Returns their numbers. A launcher may have bound this process to a subset."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def warn_of_few_cores(key: str, number: int, rank: int = 0) -> None:
    """Logs a warning on rank 0 for more processes or threads of this process than cores that it may use."""
    have = cores()
    if rank == 0 and number > max(have, 2):  # the least that data.workers=auto chooses
        there = f"{key}={number} is more than the {have} cores that this process may use"
        log.warning("%s: they wait for each other, give %d", there, have)


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
    """Expands SLURM's host list notation: `n[01-03,7],gpu1` to n01, n02, n03, n7 and gpu1. Raises ConfigError."""
    hosts: list[str] = []
    for one in re.findall(r"(?:\[[^]]*\]|[^,[])+", nodelist):
        parts = re.split(r"\[([\d,-]+)\]", one)  # names and number ranges alternate
        choices = [_expand_range(part) if k % 2 else [part] for k, part in enumerate(parts)]
        hosts += itertools.islice(map("".join, itertools.product(*choices)), _MOST_HOSTS - len(hosts))
    return tuple(hosts)


def _expand_range(text: str) -> Iterator[str]:
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if found is None:
            raise ConfigError(f"[{_shown(text)}] in SLURM's list of hosts is not a range, as [01-03,7]: correct it")
        low, high = found[1], found[2] or found[1]
        yield from (f"{k:0{len(low)}}" for k in range(int(low), int(high) + 1))


def _in_srun_step(env: Mapping[str, str]) -> bool:
    """Returns whether srun started this process as one of several tasks.

    The shell of an allocation has no numbered step, and the shell of `srun --pty` has a terminal.
    """
    step = env.get("SLURM_STEP_ID", "")
    if not _NUMBER.fullmatch(step) or int(step) >= _FIRST_RESERVED_STEP:
        return False
    # Tasks that srun starts from this shell inherit the variable, but not the terminal.
    if "SLURM_PTY_PORT" in env and any(map(os.isatty, (0, 1, 2))):
        return False
    return env.get(_SRUN.world, "1") != "1"


def _rank_and_world(env: Mapping[str, str], launcher: _Launcher) -> tuple[int, int]:
    """Returns (rank, world), or (0, 1) if the launcher's variables are not set."""
    names = (launcher.rank, launcher.world)
    present = [name for name in names if env.get(name)]
    if not present:
        return 0, 1
    for name in names:
        one = present[0]
        fix = f"set both, as {launcher.name} does, or unset {one}"
        require(name in present, f"{one}={_shown(env[one])} without {name}: {fix}")
    rank, world = (_integer(env, name) for name in names)
    require(
        rank < world,
        f"{launcher.rank}={rank} is not below {launcher.world}={world}: ranks count from 0, so correct one of them",
    )
    return rank, world


def _integer(env: Mapping[str, str], name: str) -> int:
    text = env[name]
    is_number = _NUMBER.fullmatch(text) is not None
    require(is_number, f"{name}={_shown(text)} is not a whole number of 0 or more: correct it, or unset it")
    return int(text)


def _shown(text: str) -> str:
    return escaped(text[:_SHOWN])


def _local_rank(env: Mapping[str, str], launcher: _Launcher, rank: int) -> int:
    """Returns the rank within the host, or 0 if no variable is set: one process per host, as in a Kubernetes pod."""
    name = next((name for name in launcher.local_rank if env.get(name)), None)
    if name is None:
        same = env.get("SLURM_PROCID") == str(rank) and env.get("SLURM_LOCALID")
        return _integer(env, "SLURM_LOCALID") if same else 0
    local = _integer(env, name)
    size = next((size for size in launcher.local_world if env.get(size)), launcher.world)
    require(
        local < _integer(env, size),
        f"{name}={local} is not below {size}={env[size]}: ranks of a host count from 0, so correct one of them",
    )
    return local


def _endpoint(env: Mapping[str, str], launcher: _Launcher, world: int) -> tuple[str, int]:
    """Returns host and port of the store: MASTER_ADDR and MASTER_PORT, else derived from the job's hosts and number."""
    single_host = any(env.get(name) == str(world) for name in launcher.local_world)  # all on this host
    # mpirun's SLURM step may lack the job's first host; an srun step may use only some of the job's hosts.
    lists = ("SLURM_JOB_NODELIST",) if launcher in _MPI else ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    hosts = next((found for name in lists if (found := expand_nodelist(env.get(name, "")))), ())
    host = env.get("MASTER_ADDR") or (_LOCALHOST if single_host else hosts[0] if hosts else "")
    if env.get("MASTER_PORT"):
        port = _integer(env, "MASTER_PORT")
        require(0 < port < 2**16, f"MASTER_PORT={port} is not a port: choose one from 1 to 65535")
    else:
        port = _port_of_job(env, launcher) or (_DEFAULT_PORT if single_host else 0)
    for name, missing in (("MASTER_ADDR", not host), ("MASTER_PORT", not port)):
        require(
            not missing,
            f"{launcher.world}={world} without {name}: export MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free "
            f"port of that host, to all ranks, or unset {launcher.rank} and {launcher.world} for one process",
        )
    return host, port


def _port_of_job(env: Mapping[str, str], launcher: _Launcher) -> int:
    """Returns the same port on all ranks, different for each job and srun step; 0 without a job number."""
    job = env.get("SUBMITIT_LOCAL_JOB_ID" if launcher is _SUBMITIT else "SLURM_JOB_ID", "")
    if not _NUMBER.fullmatch(job):
        return 0
    step = int(env["SLURM_STEP_ID"]) if launcher is _SRUN else 0
    return _PORTS[(int(job) + 7919 * step) % len(_PORTS)]


def _job_id(env: Mapping[str, str], launcher: _Launcher) -> str:
    names = {
        _TORCHRUN: ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        _SUBMITIT: ("SUBMITIT_LOCAL_JOB_ID",),
        _SRUN: ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    }
    return ".".join(env.get(name, "") for name in names.get(launcher, ()))
