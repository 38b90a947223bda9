"""Rendezvous of real processes under each launcher, and the error of each failure."""

from __future__ import annotations

import json
import os
import socket
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


# ---------------------------------------------------------------------------------------------------------------------- SLURM
