"""Rendezvous of real processes under each launcher, and the error of each failure."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from helpers import SCRIPTS
from helpers.forks import Fork
from helpers.processes import free_ports

from clipx.distributed.launch_env import cores
from clipx.errors import Exit

SCRIPT = str(SCRIPTS / "rendezvous.py")
HOST = socket.gethostname()
SHORT = '{"rendezvous_s": 20}'  # ranks on a busy machine start seconds apart
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")

Output = dict[str, Any]


@pytest.fixture(autouse=True)
def _no_launch_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables of a launcher, and the number of threads."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


class Start(Protocol):
    """Starts rendezvous.py on a rank, as a fork. Its output goes to one file."""

    def __call__(self, rank: int, world: int, *arguments: str, **env: str) -> Fork: ...


@pytest.fixture
def start(tmp_path: Path, port: int) -> Iterator[Start]:
    started: list[Fork] = []

    def start(rank: int, world: int, *arguments: str, **env: str) -> Fork:
        place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        out = tmp_path / f"out.{len(started)}"
        env = {**os.environ, **place, "MASTER_PORT": str(port), **env}
        started.append(Fork((SCRIPT, *arguments), env, out, out))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def port() -> int:
    return free_ports(1)


def outputs(*processes: Fork) -> list[Output]:
    """Waits for all processes. Returns the JSON that they printed, in rank order."""
    for process in processes:
        process.wait(600)
    return parse_output("".join(process.out.read_text() for process in processes))


def parse_output(text: str) -> list[Output]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"] or 0)


def is_complete(found: list[Output], world: int, local_ranks: list[int]) -> bool:
    ranks = [(x["rank"], x["world"], x["local_rank"], x["sum"]) for x in found]
    return ranks == [(rank, world, local, sum(range(world))) for rank, local in enumerate(local_ranks)]


# --------------------------------------------------------------------------------------- successful rendezvous, by launcher


def test_manually_started_processes_rendezvous_twice_and_share_the_cores(start: Start) -> None:
    """Two rendezvous in a row, as in the points of a sweep. Rank 0 warns that rank 1 has another version of torch.

    Rank 0, which serves the store, ends the first rendezvous when the others have begun the second.
    """
    own: list[dict[str, str]] = [{"LATE": "1"}, {"TORCH": "2.0"}, {}]
    ranks = [start(rank, 3, "{}", "2", **own[rank]) for rank in range(3)]
    found = outputs(*ranks)
    assert is_complete(found, 3, [0, 1, 2])
    assert {x["threads"] for x in found} == {max(1, cores() // 3)}
    assert [x["sharing"] for x in found] == [3, 3, 3]
    warning = f"rank 1 (host {HOST}) has torch=2.0, the others {torch.__version__}: prefer the same on all hosts\n"
    assert ranks[0].out.read_text().count(warning) == 2


@pytest.mark.slow
def test_two_torchrun_agents_form_one_job(port: int) -> None:
    """Two rendezvous in a row, through the store of the first agent."""
    common = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2")
    place = ("--master-addr=127.0.0.1", f"--master-port={port}")
    agents = [
        subprocess.Popen([*common, *place, f"--node-rank={node}", SCRIPT, "{}", "2"], stdout=subprocess.PIPE, text=True)
        for node in (0, 1)
    ]
    found = parse_output("".join(agent.communicate(timeout=600)[0] for agent in agents))
    assert is_complete(found, 4, [0, 1, 0, 1])
    assert {x["threads"] for x in found} == {1}, "torchrun sets OMP_NUM_THREADS=1"


# ------------------------------------------------------------------------------------------------------------------ failures


def test_all_joined_ranks_name_the_missing_ranks(start: Start, port: int) -> None:
    ranks = [start(rank, 5, SHORT) for rank in (0, 2)]
    for rank in outputs(*ranks):
        assert rank["error"].startswith(
            f"ranks 1, 3-4 of 5 have not joined 127.0.0.1:{port}; joined: ranks 0, 2 (host {HOST}); "
            "distributed.rendezvous_s=20 has passed: "
        )
    assert [rank.wait() for rank in ranks] == [Exit.FAILED] * 2


def test_an_unreachable_rank_0_is_named(start: Start, port: int) -> None:
    (rank,) = outputs(lonely := start(1, 2, SHORT))
    assert rank["error"].startswith(
        f"rank 1 (host {HOST}) did not reach rank 0 at 127.0.0.1:{port} within distributed.rendezvous_s=20 ("
    )
    assert lonely.wait() == Exit.FAILED


def test_a_rank_with_a_different_configuration_is_named_with_the_key(start: Start, port: int) -> None:
    ranks = [start(rank, 3, **({"COLOUR": "blue"} if rank == 1 else {})) for rank in range(3)]
    for rank in outputs(*ranks):
        assert rank["error"] == (
            f"rank 1 (host {HOST}) has colour=blue, the others red: start all ranks with the same command, files "
            "and data"
        )


# ---------------------------------------------------------------------------------------------------------------------- SLURM


def srun(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["srun", *command], env={**os.environ, **env}, capture_output=True, text=True, timeout=600, check=False
    )


TASKS = ("--nodes=2", "--ntasks-per-node=2")


@pytest.mark.usefixtures("slurm")
def test_tasks_of_srun_form_a_job_despite_leftover_variables() -> None:
    done = srun(*TASKS, sys.executable, SCRIPT, RANK="0", WORLD_SIZE="1")
    found = parse_output(done.stdout)
    assert is_complete(found, 4, [0, 1, 0, 1]), done.stderr
    assert found[0]["hosts"] == ["n1", "n1", "n2", "n2"]
    assert {x["threads"] for x in found} == {max(1, cores() // 4)}, "both nodes are this machine"
