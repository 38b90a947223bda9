"""A rank that is lost at any place: each other rank names it in one line and ends, and the next start resumes."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import pytest
from helpers import SCRIPTS, forks
from helpers.cases import slow_except
from helpers.processes import free_ports
from helpers.runs import SMALL, VIT, compose, events, rank_environment, rows

from clipx.checkpoint.format import CheckpointDir, find_damage
from clipx.errors import Exit
from clipx.run.lock import LOCK
from clipx.trainer.trainer import Trainer

HOST = re.escape(socket.gethostname())
TRAIN = (
    *SMALL,
    *VIT,
    "data.samples=96",
    "data.batch_size=24",
    "distributed=cpu",
    "duration=3st",
    "checkpoint.every=1st",
)

# place, fault, victim, ranks
CASES = [
    ("start", "kill", 0, 2),
    ("rendezvous", "kill", 1, 2),
    ("rendezvous", "stop", 1, 3),
    ("connect", "raise", 1, 2),
    ("data", "stop", 0, 2),
    ("data", "kill", 2, 3),
    ("model", "_exit", 1, 2),
    ("model", "exit", 0, 2),
    ("directory", "kill", 0, 2),
    ("writer", "stop", 1, 2),
    ("loggers", "exit", 1, 3),
    ("first step", "kill", 0, 3),
    ("logged", "raise", 0, 2),
    ("evaluation", "_exit", 1, 3),
    ("staged", "stop", 1, 2),
    ("written", "stop", 0, 3),
    ("committed", "_exit", 1, 3),
    ("uploading", "stop", 1, 3),
    ("signalled", "kill", 1, 2),
    ("twice", "kill", 1, 3),
    ("end", "kill", 0, 2),
]


def words_of(place: str, folder: Path) -> list[str]:
    words = [*TRAIN, f"run_dir={folder / 'run'}"]
    if place == "start":
        words += ["distributed.rendezvous_s=2"]
    if place == "evaluation":
        words += ["evaluator=[retrieval]"]
    if place == "uploading":
        words += [f"checkpoint.remote=file://{folder}/remote"]
    return words


def run_and_lose(folder: Path, place: str, fault: str, victim: int, world: int, command: list[str]) -> list[forks.Fork]:
    """Starts the ranks, and returns them when those that are not lost have ended."""
    port = free_ports(1)
    words = [str(SCRIPTS / "lose_rank.py"), place, fault, str(victim), *command]
    ranks = [
        forks.Fork(words, rank_environment(rank, world, port), folder / f"{rank}.out", folder / f"{rank}.err")
        for rank in range(world)
    ]
    try:
        for rank, process in enumerate(ranks):
            if rank != victim:
                process.wait(600)
    except BaseException:
        for process in ranks:
            process.kill()
        raise
    assert "lost\n" in (folder / f"{victim}.out").read_text(), errors(folder, victim)
    return ranks


def errors(folder: Path, rank: int) -> str:
    """Returns what a rank wrote to stderr, without the lines about the data, which the first test prepares."""
    lines = (folder / f"{rank}.err").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("writing shapes", "indexing")))


@pytest.mark.parametrize(
    "case", slow_except(CASES, ("directory", "kill", 0, 2)), ids=lambda case: "-".join(map(str, case))
)
def test_the_others_name_a_lost_rank_and_the_run_resumes(tmp_path: Path, case: tuple[str, str, int, int]) -> None:
    place, fault, victim, world = case
    run, words = tmp_path / "run", words_of(place, tmp_path)
    ranks = run_and_lose(tmp_path, place, fault, victim, world, ["clipx.train", *words])
    try:
        said = {rank: errors(tmp_path, rank) for rank in range(world)}
        for rank in set(range(world)) - {victim} - ({2} if place == "twice" else set()):
            assert ranks[rank].returncode == Exit.FAILED, said
            assert re.fullmatch(rf"error \(rank {rank}\): .*\b(ranks? {victim})\b.*\n", said[rank]), said
        if victim != 0:
            assert not (run / LOCK).exists()
        if fault == "stop":
            ranks[victim].send_signal(signal.SIGCONT)
            assert ranks[victim].wait(600) == Exit.FAILED
        if fault in ("stop", "raise"):
            assert errors(tmp_path, victim).count("\n") == 1, errors(tmp_path, victim)
    finally:
        for process in ranks:
            process.kill()
    folders = CheckpointDir(run / "checkpoints", print).folders()
    assert [find_damage(folder) for folder in folders] == [None] * len(folders)
    Trainer(compose(*words, "resume=auto")).fit()
    assert rows(run)[-1]["step"] == 3


@pytest.mark.slow
def test_an_error_of_this_rank_is_reported_though_another_one_is_lost(tmp_path: Path) -> None:
    """The checkpoint that is being written when rank 0 fails waits for rank 1, which is suspended."""
    ranks = run_and_lose(tmp_path, "failing", "stop", 1, 2, ["clipx.train", *words_of("failing", tmp_path)])
    ranks[1].kill()
    assert ranks[0].returncode == Exit.FAILED
    assert errors(tmp_path, 0) == "error (rank 0): the shard is gone: bring it back\n"
    assert not (tmp_path / "run" / LOCK).exists()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_that_is_complete_needs_no_other_rank(tmp_path: Path, victim: int) -> None:
    ranks = run_and_lose(tmp_path, "close", "kill", victim, 2, ["clipx.train", *words_of("close", tmp_path)])
    assert ranks[1 - victim].returncode == Exit.FINISHED
    assert events(tmp_path / "run")[-1]["event"] == "end"


@pytest.mark.slow
def test_commands_name_a_lost_rank(tmp_path: Path) -> None:
    Trainer(compose(*TRAIN, f"run_dir={tmp_path / 'run'}")).fit()
    command = ["clipx.evaluate", f"run={tmp_path / 'run'}", "evaluator=[retrieval]", "distributed=cpu"]
    ranks = run_and_lose(tmp_path, "evaluate", "kill", 1, 2, command)
    assert ranks[0].returncode == Exit.FAILED
    assert re.fullmatch(
        rf"error \(rank 0\): rank 1 \(host {HOST}, pid {ranks[1].pid}\) sent no heartbeat for .*\n",
        errors(tmp_path, 0),
    )
