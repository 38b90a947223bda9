"""A copy of the project without clipx/extra: the core needs nothing of it, and says what an option of it lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.runs import SMALL, VIT, rows

from clipx.config.registry import discover_installed
from clipx.config.typed import last_of_each

FEW = (*SMALL, *VIT, "evaluator=[retrieval]", "logger=[tensorboard]", "checkpoint.every=2st")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without_extra")
    for part in ("clipx", "conf", "launch"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(folder / "clipx/extra")
    return folder


def start(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a module of the copy in the folder of the copy."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(copy), str(copy / "launch"))), "COLUMNS": "200"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=600, check=False)


def ended(copy: Path, *words: str) -> str:
    done = start(copy, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(copy: Path, *words: str) -> str:
    done = start(copy, *words)
    assert done.returncode == 2 and done.stdout == "", done
    (line,) = done.stderr.splitlines()
    return line


def options(*words: str) -> Sequence[str]:
    return last_of_each([*FEW, *words])


MISSING = "; it may be in clipx.extra, which is not installed: install clipx again"


def test_what_is_missing_is_said_in_one_line(copy: Path) -> None:
    known = r"classification, dcl, .*siglip, sogclr"
    assert re.fullmatch(
        rf"error: objective=coca is not an option: choose one of {known}{re.escape(MISSING)}",
        refused(copy, "clipx.train", "objective=coca"),
    )
    assert refused(copy, "clipx", "train", "model=naflex_tiny").endswith(MISSING)
    needs = "needs clipx.extra, which is not installed: install clipx again"
    assert refused(copy, "clipx.look", "data=shapes") == f"error: the command look {needs}"
    assert refused(copy, "clipx", "wise-ft") == f"error: the command wise-ft {needs}"


def test_the_copy_is_the_one_that_runs(copy: Path) -> None:
    show = "import clipx, sys, clipx.config.registry as r; print(clipx.__file__, r.discover_installed())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(copy), str(copy / "launch")))}
    words = [sys.executable, "-c", show]
    shown = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.split() == [str(copy / "clipx/__init__.py"), "()"] and len(discover_installed()) > 8


@pytest.mark.slow
def test_training_resume_export_and_a_sweep_need_nothing_of_it(copy: Path) -> None:
    ended(copy, "clipx.train", *options("duration=4st", "name=run", "report=true"))
    assert (copy / "outputs/run/report.html").is_file()
    ended(copy, "clipx.train", "resume=outputs/run", "duration=6st")
    steps = [row["step"] for row in rows(copy / "outputs/run") if "train/loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    ended(copy, "clipx.export", "run=outputs/run", "format=safetensors", "out=weights.safetensors")
    assert (copy / "weights.safetensors").stat().st_size > 1_000_000
    ended(
        copy,
        "clipx.evaluate",
        "run=weights.safetensors",
        "data=shapes",
        "data.held_out_samples=48",
        "evaluator=[zeroshot]",
    )
    ended(
        copy, "clipx.train", "-m", *options("seed=0,1", "duration=2st", "schedule.warmup=1st", "hydra.sweep.dir=sweep")
    )
    assert [len(rows(copy / f"sweep/{point}")) > 0 for point in range(2)] == [True, True]
