"""Sweeps with the files that launchers write, created in this process.

Runs are trained only if a test needs results.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clipx.processes import process_stat
from clipx.report.console import is_headline
from clipx.run import lock
from clipx.trainer.trainer import Trainer
from clipx_launch.__main__ import main
from clipx_launch.commands.run import RunFiles
from clipx_launch.commands.runs import sweep_runs
from clipx_launch.options import LaunchSpec, LocalSpec
from clipx_launch.planned import Planned
from clipx_launch.point import Point, Result, config_hash
from clipx_launch.sweep import Sweep
from helpers.runs import small

QUICK = ("duration=4st", "evaluator=[retrieval]", "checkpoint=none")


def make_sweep(
    folder: Path, *typed: list[str], common: tuple[str, ...] = QUICK, spec: LaunchSpec | None = None
) -> Sweep:
    """Creates a sweep with a point for each list of overrides, launched except for its process."""
    sweep = Sweep(folder, dict(enumerate(typed)))
    for index, own in sweep.overrides.items():
        run = small(folder / f"{index}", *common, *own)
        at, content = folder / f"{index}", config_hash(run)
        point = Point(folder=at, index=index, overrides=[*common, *own], content=content, sweep=str(folder))
        sweep.planned.append(Planned(point, run))
    sweep.check(LocalSpec())
    for planned in sweep.planned:
        planned.point.create(planned.spec)
    (folder / ".launch").mkdir(exist_ok=True)
    sweep.save(spec or LocalSpec())
    return sweep


def train(planned: Planned) -> None:
    numbers = Trainer(planned.spec).fit()
    planned.point.write_result(
        Result("finished", value=next((v for name, v in numbers.items() if is_headline(name)), None))
    )


def states(folder: Path) -> dict[str, tuple[str, str]]:
    return {run.name: (run.state.value, run.reason) for run in sweep_runs(folder)}


def run_named(folder: Path, name: str) -> RunFiles:
    (found,) = (run for run in sweep_runs(folder) if run.name == name)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 2) -> str:
    """Returns the only line that a command of `clipx-sweep` prints, to stderr, when it ends with this exit code."""
    capsys.readouterr()
    assert main(list(map(str, words))) == code
    out, errors = capsys.readouterr()
    assert (out, errors.count("\n"), errors[:7]) == ("", 1, "error: "), errors
    return errors


@contextmanager
def idle_process() -> Iterator[tuple[subprocess.Popen[bytes], lock.Holder]]:
    """Yields a process that is idle until it is ended, and its identity as a lock stores it."""
    with subprocess.Popen(["sleep", "600"]) as child:
        born = process_stat(child.pid).born
        try:
            yield child, dataclasses.replace(lock.Holder.current(), id="x", pid=child.pid, born=born)
        finally:
            child.kill()


def set_launcher(folder: Path, holder: lock.Holder) -> None:
    """Writes another process as the launcher into sweep.json."""
    path = folder / ".launch/sweep.json"
    known = json.loads(path.read_text())
    for launch in known["launches"]:
        launch["process"] = dataclasses.asdict(holder)
    path.write_text(json.dumps(known))


def write_lock(run_dir: Path, holder: lock.Holder) -> None:
    (run_dir / lock.LOCK).write_text(json.dumps(dataclasses.asdict(holder)))
