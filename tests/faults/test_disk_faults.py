"""A disk that fails at any call of a start, a resume, an evaluation or an export: one line, and nothing is lost.

Each case draws a call by its seed: it fails once, or all later ones fail as well, with one of the errors of a disk.
"""

from __future__ import annotations

import errno
import functools
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers import file_faults
from helpers.cases import slow_except
from helpers.file_faults import CHANGES, READS, Fault
from helpers.runs import SMALL, VIT, tensors

from clipx.checkpoint.format import find_damage

TRAIN = ("-m", "clipx.train", *SMALL, *VIT, "data.samples=64", "schedule.warmup=0st", "resume=auto", "run_dir=run")
DATA = ("data=shapes", "data.samples=64", "data.held_out_samples=16", "data.workers=0")
COMMANDS: dict[str, tuple[str, ...]] = {
    "start": (*TRAIN, "duration=2st", "report=true", "evaluator=[zeroshot]"),
    "resume": (*TRAIN, "duration=4st", "checkpoint.every=1st"),
    "evaluate": ("-m", "clipx.evaluate", "run=run", "evaluator=[zeroshot,retrieval]", *DATA),
    "export": ("-m", "clipx.export", "run=run", "out=exported", "format=open_clip"),
    "safetensors": ("-m", "clipx.export", "run=run", "out=exported.safetensors", "format=safetensors"),
}
"""Commands in a folder that holds the run of two steps, but for a start."""

FAILURES = [  # kind of the calls, error, and whether all later calls fail as well
    (CHANGES, errno.ENOSPC, True), (CHANGES, errno.ENOSPC, False), (CHANGES, errno.EIO, True),
    (CHANGES, errno.EIO, False), (CHANGES, errno.EROFS, True), (CHANGES, errno.EACCES, False),
    (READS, errno.EIO, False), (READS, errno.EACCES, False),
]  # fmt: skip
CASES = [(command, seed) for command in COMMANDS for seed in range(13)]
USUAL = [("resume", 0), ("evaluate", 3)]


class Healthy:
    """Folders before and after each command without a fault, and its calls."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, command: str) -> Path:
        """Returns a new copy of what the command starts from."""
        path = self.root / "work"
        shutil.rmtree(path, ignore_errors=True)
        if command == "start":
            path.mkdir()
        else:
            shutil.copytree(self.begun(), path)
        return path

    @functools.cache  # noqa: B019  # lives as long as the tests
    def begun(self) -> Path:
        """Returns the folder of a run of two steps, with a checkpoint of each."""
        path = self.root / "begun"
        path.mkdir()
        run(path, (*TRAIN, "duration=2st", "checkpoint.every=1st"), None)
        return path

    @functools.cache  # noqa: B019
    def after(self, command: str) -> tuple[Path, Sequence[file_faults.Call]]:
        """Returns the folder after the command, and its calls."""
        before = self.folder(command)
        calls = file_faults.count(before, placed(before, command), READS | CHANGES)
        path = before.rename(self.root / command)
        return path, calls


def placed(folder: Path, command: str | Sequence[str]) -> list[str]:
    """Returns the words of a command with its paths in a folder."""
    words = COMMANDS[command] if isinstance(command, str) else command
    paths = ("run_dir=run", "run=run", "out=exported")
    return [word.replace("=", f"={folder}/", 1) if word.startswith(paths) else word for word in words]


def run(folder: Path, command: str | Sequence[str], fault: Fault | None) -> tuple[int, str, str]:
    """Runs a command in a folder. Returns its exit code, and what it printed on stdout and stderr."""
    done = file_faults.run(folder, placed(folder, command), fault or Fault(1 << 40, None))
    assert fault is not None or done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    return Healthy(tmp_path_factory.mktemp("disk"))


@pytest.mark.parametrize("case", slow_except(CASES, *USUAL), ids=str)
def test_a_failing_disk_is_one_line_and_loses_nothing(healthy: Healthy, case: tuple[str, int]) -> None:
    command, seed = case
    kind, error, lasting = FAILURES[seed % len(FAILURES)]
    expected, calls = healthy.after(command)
    own = [call for call in calls if (call.name in file_faults.READ_NAMES) == (kind == READS)]
    number = random.Random(f"{command} {seed}").randrange(len(own))
    folder = healthy.folder(command)
    code, stdout, stderr = run(folder, command, Fault(number, error, lasting, kind))

    lines = stderr.splitlines()
    assert code in (0, 1, 2), stderr
    assert sum(line.startswith("error: ") for line in lines) == (code != 0), stderr
    assert code == 0 or lines[-1].startswith("error: "), stderr  # the reason is what a user sees last
    for checkpoint in (folder / "run" / "checkpoints").glob("step-*"):
        assert find_damage(checkpoint) is None

    earlier = "falling back to the previous checkpoint" in stdout + stderr  # which is exported then, and said
    for exported in folder.glob("exported*") if earlier else ():
        exported.unlink() if exported.is_file() else shutil.rmtree(exported)
    if earlier or code or command not in ("export", "safetensors"):  # which refuse to replace their output
        run(folder, command, None)
    if command in ("start", "resume"):
        step = 2 if command == "start" else 4
        found, same = tensors(folder / "run", step), tensors(expected / "run", step)
        assert found.keys() == same.keys() and all(torch.equal(found[name], same[name]) for name in found)
    for pattern in ("exported*/*.safetensors", "*.safetensors", "run/evaluation*.json"):
        for file in expected.glob(pattern):
            equal = (folder / file.relative_to(expected)).read_bytes() == file.read_bytes()
            assert equal, file
