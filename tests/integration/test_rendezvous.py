"""Rendezvous of real processes, and the error of each failure."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SCRIPTS
from helpers.forks import Fork
from helpers.processes import free_ports

from clipx.distributed.launch_env import cores
from clipx.errors import Exit

HOST = socket.gethostname()
SHORT = '{"rendezvous_s": 20}'  # ranks on a busy machine start seconds apart


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns a free port. Removes the number of threads from the environment."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return free_ports(1)


def joined(
    folder: Path, port: int, world: int, ranks: Mapping[int, dict[str, str]], *arguments: str
) -> tuple[list[Fork], list[dict[str, Any]]]:
    """Starts rendezvous.py on ranks with variables of their own. Returns the ended processes, and what they printed."""
    started = []
    for rank, own in ranks.items():
        places = {
            "RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        env = {**os.environ, **{name: str(value) for name, value in places.items()}, **own}
        out = folder / f"out.{rank}"
        started.append(Fork((str(SCRIPTS / "rendezvous.py"), *arguments), env, out, out))
    for process in started:
        process.wait(600)
    lines = "".join(process.out.read_text() for process in started).splitlines()
    return started, [json.loads(line) for line in lines if line.startswith("{")]


def test_manually_started_processes_rendezvous_twice_and_share_the_cores(tmp_path: Path, port: int) -> None:
    """Two rendezvous in a row, as in the points of a sweep. Rank 0 warns that rank 1 has another version of torch.

    Rank 0, which serves the store, ends the first rendezvous when the others have begun the second.
    """
    ranks, found = joined(tmp_path, port, 3, {0: {"LATE": "1"}, 1: {"TORCH": "2.0"}, 2: {}}, "{}", "2")
    assert [(x["rank"], x["world"], x["local_rank"], x["sum"]) for x in found] == [(i, 3, i, 3) for i in range(3)]
    assert {x["threads"] for x in found} == {max(1, cores() // 3)}
    assert [x["sharing"] for x in found] == [3, 3, 3]
    warning = f"rank 1 (host {HOST}) has torch=2.0, the others {torch.__version__}: prefer the same on all hosts\n"
    assert ranks[0].out.read_text().count(warning) == 2


def test_all_joined_ranks_name_the_missing_ranks(tmp_path: Path, port: int) -> None:
    ranks, found = joined(tmp_path, port, 5, {0: {}, 2: {}}, SHORT)
    for rank in found:
        assert rank["error"].startswith(
            f"ranks 1, 3-4 of 5 have not joined 127.0.0.1:{port}; joined: ranks 0, 2 (host {HOST}); "
            "distributed.rendezvous_s=20 has passed: "
        )
    assert [rank.wait() for rank in ranks] == [Exit.FAILED] * 2


@pytest.mark.slow
def test_an_unreachable_rank_0_is_named(tmp_path: Path, port: int) -> None:
    (lonely,), (found,) = joined(tmp_path, port, 2, {1: {}}, SHORT)
    assert found["error"].startswith(
        f"rank 1 (host {HOST}) did not reach rank 0 at 127.0.0.1:{port} within distributed.rendezvous_s=20 ("
    )
    assert lonely.wait() == Exit.FAILED


def test_a_rank_with_a_different_configuration_is_named_with_the_key(tmp_path: Path, port: int) -> None:
    _, found = joined(tmp_path, port, 3, {0: {}, 1: {"COLOUR": "blue"}, 2: {}})
    assert [rank["error"] for rank in found] == [
        f"rank 1 (host {HOST}) has colour=blue, the others red: start all ranks with the same command, files and data"
    ] * 3
