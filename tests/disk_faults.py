"""A disk that fails at each call of a start, a resume, an evaluation and two exports, with each error of a disk.

    python tests/disk_faults.py                         # all, an hour on two cores
    python tests/disk_faults.py start export -n 4       # these commands, four processes
    python tests/disk_faults.py --every 20 --from 7     # the calls 7, 27, 47, …

Each case fails one call on the files of the command, or all from one on, and verifies that the command finishes or ends
with one line; that all checkpoints are intact; and that the command, repeated on a healthy disk, ends bit for bit as if
nothing had failed. Prints the cases that do not, and the table of docs/guides/reliability.md. Exit code: 1 if there are
any. faults/test_disk_faults.py draws some of the cases.
"""

from __future__ import annotations

import argparse
import errno
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, NamedTuple

if __name__ == "__main__":  # helpers import the clipx of this tree, whatever the environment has installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as tests/conftest.py does, before torch is imported

from helpers import file_faults
from helpers.file_faults import CHANGES, READ_NAMES, READS, Call, Fault
from helpers.runs import SMALL, VIT, tensors

from clipx.checkpoint.format import find_damage
from clipx.checkpoint.resume import is_checkpoint
from clipx.config.lazy_torch import torch

# A constant learning rate: a run of two steps that a longer one continues from its first computes the second again.
SCHEDULE = ("schedule=constant", "schedule.warmup=0st")
TRAIN = ("-m", "clipx.train", *SMALL, *VIT, *SCHEDULE, "data.samples=64", "resume=auto", "run_dir=run")
DATA = ("data=shapes", "data.samples=64", "data.held_out_samples=16", "data.workers=0")
COMMANDS: dict[str, tuple[str, ...]] = {
    "start": (*TRAIN, "duration=2st", "report=true", "evaluator=[zeroshot]"),
    "resume": (*TRAIN, "duration=4st", "checkpoint.every=1st"),
    "evaluate": ("-m", "clipx.evaluate", "run=run", "evaluator=[zeroshot,retrieval]", *DATA),
    "export": ("-m", "clipx.export", "run=run", "out=exported", "format=open_clip"),
    "safetensors": ("-m", "clipx.export", "run=run", "out=exported.safetensors", "format=safetensors"),
}
"""Commands in a folder that holds the run of two steps, but for a start."""


class Failure(NamedTuple):
    """An error of the calls of a kind: of one of them, or of one and all later ones."""

    kind: int
    error: int
    lasting: bool


FAILURES = (
    *(Failure(CHANGES, error, False) for error in (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES)),
    *(Failure(CHANGES, error, True) for error in (errno.ENOSPC, errno.EIO, errno.EROFS)),
    *(Failure(READS, error, False) for error in (errno.EIO, errno.EACCES)),
    Failure(READS, errno.EIO, True),
)

Outcome = Literal["finished", "one line"]


class Healthy:
    """Folders before and after each command without a fault, and its calls. Cases of a `Healthy` share one folder."""

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

    @functools.cache  # noqa: B019  # lives as long as the cases
    def begun(self) -> Path:
        """Returns the folder of a run of two steps, with a checkpoint of each."""
        path = self.root / "begun"
        path.mkdir()
        _run(path, (*TRAIN, "duration=2st", "checkpoint.every=1st"), None)
        return path

    @functools.cache  # noqa: B019
    def after(self, command: str) -> tuple[Path, Sequence[Call]]:
        """Returns the folder after the command, and its calls."""
        before = self.folder(command)
        calls = file_faults.count(before, _placed(before, COMMANDS[command]), READS | CHANGES)
        return before.rename(self.root / command), calls

    def calls(self, command: str, kind: int) -> list[Call]:
        """Returns the calls of a kind that the command makes."""
        return [call for call in self.after(command)[1] if (call.name in READ_NAMES) == (kind == READS)]

    def outcome(self, command: str, number: int, failure: Failure) -> Outcome:
        """Returns how the command ends whose call `number` of the kind fails. Raises AssertionError for a wrong end."""
        expected, _ = self.after(command)
        folder = self.folder(command)
        fault = Fault(number, failure.error, failure.lasting, failure.kind)
        code, stdout, stderr = _run(folder, COMMANDS[command], fault)

        lines = stderr.splitlines()
        assert code in (0, 1, 2), f"exit code {code}: {stderr}"
        assert sum(line.startswith("error: ") for line in lines) == (code != 0), f"exit code {code}: {stderr}"
        assert code == 0 or lines[-1].startswith("error: "), stderr  # the reason is what a user sees last
        for checkpoint in (folder / "run" / "checkpoints").glob("step-*"):
            assert is_checkpoint(checkpoint.name), f"an intact checkpoint was renamed to {checkpoint.name}"
            assert find_damage(checkpoint) is None, f"{checkpoint.name}: {find_damage(checkpoint)}"

        earlier = "falling back to the previous checkpoint" in stdout + stderr  # which is exported then, and said
        for exported in folder.glob("exported*") if earlier else ():
            exported.unlink() if exported.is_file() else shutil.rmtree(exported)
        if earlier or code or command not in ("export", "safetensors"):  # which refuse to replace their output
            _run(folder, COMMANDS[command], None)
        _assert_same(command, folder, expected)
        return "one line" if code else "finished"


def _assert_same(command: str, folder: Path, expected: Path) -> None:
    if command in ("start", "resume"):
        step = 2 if command == "start" else 4
        found, same = tensors(folder / "run", step), tensors(expected / "run", step)
        assert found.keys() == same.keys(), "other tensors"
        assert not [name for name in found if not torch.equal(found[name], same[name])], "tensors differ"
    for pattern in ("exported*/*.safetensors", "*.safetensors", "run/evaluation*.json"):
        for file in expected.glob(pattern):
            equal = (folder / file.relative_to(expected)).read_bytes() == file.read_bytes()
            assert equal, f"{file.name} differs"


def _placed(folder: Path, words: Sequence[str]) -> list[str]:
    """Returns the words of a command with its paths in a folder."""
    paths = ("run_dir=run", "run=run", "out=exported")
    return [word.replace("=", f"={folder}/", 1) if word.startswith(paths) else word for word in words]


def _run(folder: Path, words: Sequence[str], fault: Fault | None) -> tuple[int, str, str]:
    """Runs a command in a folder. Returns its exit code, and what it printed on stdout and stderr."""
    done = file_faults.run(folder, _placed(folder, words), fault)
    assert fault is not None or done.returncode == 0, f"without a fault: {done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


class Case(NamedTuple):
    command: str
    number: int
    failure: Failure


@functools.cache
def _own() -> Healthy:
    return Healthy(Path(tempfile.mkdtemp(dir=os.environ["DISK_FAULTS"])))


def _try(case: Case) -> tuple[Case, str]:
    """Returns the outcome of a case, or what is wrong."""
    try:
        return case, _own().outcome(*case)
    except (AssertionError, subprocess.TimeoutExpired, OSError) as error:
        return case, f"WRONG: {error}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}; default: all")
    parser.add_argument("-n", type=int, default=2, help="processes")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="fail each Nth call")
    parser.add_argument("--from", type=int, default=0, metavar="K", dest="begin", help="the first call to fail")
    options = parser.parse_args(arguments)
    if unknown := set(options.commands) - COMMANDS.keys():
        parser.error(f"no command {', '.join(sorted(unknown))}; they are {', '.join(COMMANDS)}")
    with tempfile.TemporaryDirectory(prefix="disk-faults-") as root:
        os.environ["DISK_FAULTS"] = root
        return _main(options.commands or list(COMMANDS), options)


def _main(commands: Sequence[str], options: argparse.Namespace) -> int:
    sizes = {(command, kind): len(_own().calls(command, kind)) for command in commands for kind in (CHANGES, READS)}

    cases = [
        Case(command, number, failure)
        for command in commands
        for failure in FAILURES
        for number in range(options.begin, sizes[command, failure.kind], options.every)
    ]
    counts: Counter[tuple[str, Failure, str]] = Counter()
    wrong = 0
    with ProcessPoolExecutor(options.n, get_context("spawn")) as pool:
        for done, (case, outcome) in enumerate(pool.map(_try, cases), 1):
            if outcome.startswith("WRONG"):
                wrong += 1
                call = _own().calls(case.command, case.failure.kind)[case.number]
                print(f"{case.command}, call {case.number} {call}, {_named(case.failure)}: {outcome}", flush=True)
            counts[case.command, case.failure, outcome] += 1
            if done % 100 == 0:
                print(f"{done:,} of {len(cases):,} cases, {wrong} wrong", file=sys.stderr, flush=True)
    print("| command | calls | error | finished | one line |\n|---|---|---|---|---|")
    for command in commands:
        for failure in FAILURES:
            found = [counts[command, failure, outcome] for outcome in ("finished", "one line")]
            print(f"| {command} | {sizes[command, failure.kind]} | {_named(failure)} | {found[0]} | {found[1]} |")
    print(f"{len(cases):,} cases, {wrong} wrong")
    return int(wrong > 0)


def _named(failure: Failure) -> str:
    calls = {CHANGES: "change", READS: "read"}[failure.kind]
    return f"{errno.errorcode[failure.error]} at {f'all {calls}s from one on' if failure.lasting else f'one {calls}'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
