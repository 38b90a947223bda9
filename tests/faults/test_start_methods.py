"""Runs whose loader processes are started by each method of multiprocessing, and runs that lack a resource."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import SCRIPTS
from helpers.cases import slow_except
from helpers.forks import Fork
from helpers.processes import descendants_of, is_running
from helpers.runs import SMALL, VIT, start
from helpers.waiting import wait_until

CONSTRAINED = str(SCRIPTS / "constrained.py")
STEPS = 3


@contextlib.contextmanager
def training(folder: Path, method: str, *options: str, limit: str = "none") -> Iterator[Fork]:
    words = (*SMALL, *VIT, "duration=4000ep", "checkpoint=none", *options)
    trainer = start(folder / "out", CONSTRAINED, method, limit, "clipx.train", *words, f"run_dir={folder}/run")
    try:
        yield trainer
    finally:
        trainer.kill()
        trainer.wait()


def first_losses(folder: Path, trainer: Fork) -> list[float]:
    """Waits for the first steps of a run. Returns their losses."""

    def found() -> list[float]:
        assert trainer.poll() is None, trainer.err.read_text()
        file = folder / "run/metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        return [json.loads(line)["train/loss"] for line in lines[:STEPS] if line.endswith("\n")]

    wait_until(lambda: len(found()) == STEPS)
    return found()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that loads in its own process."""
    folder = tmp_path_factory.mktemp("expected")
    with training(folder, "fork") as trainer:
        return first_losses(folder, trainer)


@pytest.mark.parametrize("method", slow_except(["fork", "forkserver", "spawn"], "fork"))
def test_loader_processes_give_the_same_losses_and_end_with_a_killed_trainer(
    method: str, expected: list[float], tmp_path: Path
) -> None:
    """One thread of theirs waits for SIGTERM, which SLURM may send to all processes of a job. The others block it."""
    with training(tmp_path, method, "data.workers=2") as trainer:
        assert first_losses(tmp_path, trainer) == expected
        found = descendants_of(trainer.pid)
        loaders = [masks for masks in map(_masks, found) if len(masks) > 2]  # not a fork server or resource tracker
        assert len(loaders) == 2
        assert all(sum(not mask & 1 << signal.SIGTERM - 1 for mask in masks) == 1 for masks in loaders)
        trainer.kill()
        wait_until(lambda: not any(map(is_running, found)))


def _masks(pid: int) -> list[int]:
    """Returns the signals that each thread of a process blocks."""
    texts = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/status")]
    return [int(re.findall(r"^SigBlk:\s*(\w+)$", text, re.MULTILINE)[0], 16) for text in texts]


@pytest.mark.parametrize(
    ("limit", "options", "message"),
    [
        ("NOFILE=64", ("data.workers=2", "data.prefetch=64"), r"a process needs more than the 64 open files"),
        ("AS=+30000000", ("data.workers=2",), r"a process needs |out of memory on the host"),
    ],
)
def test_a_run_that_lacks_a_resource_ends_with_one_line(
    limit: str, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with training(tmp_path, "fork", *options, limit=limit) as trainer:
        _, said = trainer.communicate(600)
    assert trainer.returncode == 1, said
    (line,) = [line for line in said.splitlines() if line.startswith("error")]
    assert re.match(rf"error: (in a loader process: )?({message})", line), line
    assert "ulimit" in line or "lower data.batch_size" in line
    assert "Traceback" not in said
