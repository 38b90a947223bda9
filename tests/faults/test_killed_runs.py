"""A run that is killed at any place where it changes its directory continues, and ends as one that was not.

Places are drawn with fixed seeds among the calls of the system of a start, a start that resumes, and an end. Those of a
save alone, all of them: test_killed_while_saving.py.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from helpers import file_faults
from helpers.cases import slow_except
from helpers.file_faults import Fault
from helpers.runs import SMALL, VIT, rows, tensors, untimed_rows

from clipx.checkpoint.format import CheckpointDir
from clipx.config.typed import last_of_each
from clipx.storage.jsonl import read_objects

STEPS = 4
TINY = ("data.samples=64", "data.batch_size=8", "data.held_out_samples=8", f"duration={STEPS}st")
WORDS = ("-m", "clipx.train", *SMALL, *VIT, *TINY, "checkpoint.every=1st", "checkpoint.keep_last=2", "name=killed")


def words(run: Path, *overrides: str) -> list[str]:
    return last_of_each([*WORDS, "resume=auto", f"run_dir={run}", *overrides])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a run that was not killed."""
    run = tmp_path_factory.mktemp("straight") / "run"
    file_faults.count(run, words(run))
    return run


def nothing(straight: Path, run: Path) -> None:
    """A start: there is no run yet."""


def two_steps_behind(straight: Path, run: Path) -> None:
    """A start that resumes: rows and checkpoints of later steps than the newest one are missing, or are to be redone."""
    shutil.copytree(straight, run)
    shutil.rmtree(run / f"checkpoints/step-{STEPS:08d}")


def finished(straight: Path, run: Path) -> None:
    """An end: only the report is to be written."""
    shutil.copytree(straight, run)


SCENARIOS: dict[str, tuple[Callable[[Path, Path], None], Sequence[str], int]] = {
    "a start": (nothing, (), 12),
    "a start that resumes": (two_steps_behind, (), 12),
    "an end": (finished, ("report=true",), 6),
}
# Scenario, and which of its places: tests that may run at the same time.
CASES = [("a start", 0, 2), ("a start", 2, 12), ("a start that resumes", 0, 12), ("an end", 0, 6)]


@pytest.mark.parametrize("case", slow_except(CASES, CASES[0]), ids=lambda case: f"{case[0]}, {case[1]} to {case[2]}")
def test_a_run_that_is_killed_anywhere_continues_bit_for_bit(
    straight: Path, tmp_path: Path, case: tuple[str, int, int]
) -> None:
    name, first, last = case
    prepare, overrides, places = SCENARIOS[name]
    prepare(straight, tmp_path / "counted" / "run")
    calls = file_faults.count(tmp_path / "counted" / "run", words(tmp_path / "counted" / "run", *overrides))
    drawn = random.Random(44).sample(range(len(calls) - 4), places)[first:last]  # threads may save a call or two
    for place in drawn:
        run = tmp_path / str(place) / "run"
        prepare(straight, run)
        killed = file_faults.run(run, words(run, *overrides), Fault(place, None))
        assert killed.returncode == -signal.SIGKILL, f"{calls[place]}: {killed.stderr}"
        done = file_faults.run(run, words(run, *overrides), None)
        assert done.returncode == 0, f"{calls[place]}: {done.stderr}"
        assert_equal(run, straight, str(calls[place]))


def assert_equal(run: Path, straight: Path, place: str) -> None:
    """Compares weights, metrics and configuration bit for bit, and looks for what a killed process has left."""
    assert untimed_rows(run) == untimed_rows(straight), place
    assert len(rows(run)) == STEPS
    one, other = tensors(run, STEPS), tensors(straight, STEPS)
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one), place
    saved = [yaml.safe_load((path / "config.yaml").read_text()) | {"run_dir": ""} for path in (run, straight)]
    assert saved[0] | {"report": False} == saved[1], place
    assert read_objects(run / "events.jsonl")[-1]["event"] == "end"
    assert [p.name for p in CheckpointDir(run / "checkpoints", print).folders()] == ["step-00000004", "step-00000003"]
    left = {path.name for path in (run, *run.glob("checkpoints")) for path in path.iterdir()}
    own = r"config.yaml|(metrics|events).jsonl|report.(html|png)|checkpoints|step-\d{8}|run.lock.[0-9a-f]{32}"
    assert not [name for name in left if not re.fullmatch(own, name)], place
