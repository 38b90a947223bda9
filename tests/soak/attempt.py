"""One start of a training under soak: its processes, their notes, and their end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers.processes import children_of
from helpers.runs import SMALL, VIT, torchrun_command

from clipx.config.typed import last_of_each

SCRIPT = Path(__file__).with_name("observed.py")
HANDED_ON = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGUSR2"  # without it the last two end torchrun alone
SAMPLES, BATCH = 250, 12  # most epochs begin and end within a step; 1, 2 and 3 ranks can share it
# Cheap, and with all kinds of state: per-sample state, AdamW, dropout's random numbers. In 64 bits another number of
# ranks changes only the order of summation, which stays far below 1e-5 at the end.
TRAINING = (
    *SMALL,
    *VIT,
    "model.image.options={patch_size:16,embed_dim:32,depth:1,num_heads:2}",
    *("model.text.width=4", "model.text.layers=1"),
    *(f"data.samples={SAMPLES}", f"data.batch_size={BATCH}"),
    *("objective=fastclip_v3", "objective.rho=3", "precision=fp64", "distributed=cpu"),
    *("checkpoint.every=7st", "checkpoint.keep_last=3", "resume=auto"),
)
LONG_S = 240.0  # for the first step, and for an end; an idle machine takes 5 s


class Unexpected(AssertionError):
    """Behaviour that a run must not show."""


@dataclass(frozen=True)
class Note:
    """The samples that one rank took in one step."""

    attempt: int
    rank: int
    step: int
    world: int
    samples: list[int]


class Notes:
    """Folder in which the processes of a training write notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    def pids(self, attempt: int) -> dict[int, int]:
        """Returns process ids by rank, of the ranks that took a step."""
        names = (path.name.split(".") for path in self.folder.glob(f"{attempt:05d}.*"))
        return {int(rank): int(pid) for _, rank, pid in names}

    def read(self, attempt: int | None = None) -> Iterator[Note]:
        """Yields notes in the order of attempts. A line truncated by a kill is skipped."""
        pattern = "*" if attempt is None else f"{attempt:05d}.*"
        for path in sorted(self.folder.glob(pattern)):
            number, rank, _ = map(int, path.name.split("."))
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    yield Note(number, rank, **json.loads(line))

    def steps(self, attempt: int) -> list[int]:
        return sorted(note.step for note in self.read(attempt))


class Attempt:
    """Start `number` of the run in `run_dir`, with `ranks` of torchrun, or in plain python if `ranks` is 0."""

    def __init__(self, run_dir: Path, notes: Notes, number: int, ranks: int, overrides: Sequence[str]) -> None:
        self.run_dir, self.notes, self.number, self.ranks = run_dir, notes, number, ranks
        self.log = run_dir.with_name(f"{run_dir.name}.{number:05d}.log")
        self._mark = f"CLIPX_SOAK_MARK={os.getpid()}.{notes.folder.parent.name}.{run_dir.name}.{number}"
        own = {"CLIPX_SOAK_NOTES": str(notes.folder), "CLIPX_SOAK_ATTEMPT": str(number), "OMP_NUM_THREADS": "1"}
        launcher = (*torchrun_command(ranks, kill_after_s=5), HANDED_ON) if ranks else ()
        command = (sys.executable, *launcher, str(SCRIPT), *TRAINING, *overrides, f"run_dir={run_dir}", "name=soak")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                last_of_each(command),
                env={**os.environ, **own, "CLIPX_SOAK_MARK": self._mark.partition("=")[2]},
                stdout=log,
                stderr=log,
                cwd=run_dir.parent,
                start_new_session=True,  # a Ctrl-C in the terminal must reach only the test
            )

    # -------------------------------------------------------------------------------------------- observation

    @property
    def step(self) -> int:
        """The last step that any rank noted, 0 before the first."""
        return max(self.notes.steps(self.number), default=0)

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def wait_for_steps(self, number: int) -> bool:
        """Waits until all ranks took `number` steps in this attempt. Returns False if it ended before."""
        needed, end = number * max(self.ranks, 1), time.monotonic() + LONG_S
        while len(self.notes.steps(self.number)) < needed:
            if self.over:
                return False
            if time.monotonic() > end:
                raise Unexpected(f"step {number} of the attempt did not come in {LONG_S:g} s")
            time.sleep(0.05)
        return True

    def wait_s(self, seconds: float) -> None:
        """Waits for `seconds`, or until the attempt ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def rank_pids(self) -> list[int]:
        return [pid for _, pid in sorted(self.notes.pids(self.number).items())]

    def loader_pids(self) -> list[int]:
        """Returns the loader processes of all ranks."""
        return [child for pid in self.rank_pids() for child in children_of(pid)]

    def alive(self) -> list[int]:
        """Returns every process of the attempt, including orphans."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    # ---------------------------------------------------------------------------------------------------- end

    def end(self) -> tuple[int, list[int]]:
        """Waits for the end. Returns its exit code, and the exit codes of ranks that torchrun reports.

        Raises Unexpected if processes remain.
        """
        try:
            code = self.process.wait(LONG_S)
        except subprocess.TimeoutExpired:
            raise Unexpected(f"it did not end in {LONG_S:g} s") from None
        end = time.monotonic() + 30  # a loader process checks for its parent every 5 s
        while left := self.alive():
            for pid in left:
                send(pid, signal.SIGCONT)  # in case a fault stopped it
            if time.monotonic() > end:
                raise Unexpected(f"processes {left} are left behind")
            time.sleep(0.2)
        return code, [int(text) for text in re.findall(r"^ *exitcode *: (-?\d+)", self.log.read_text(), re.M)]

    def destroy(self) -> None:
        """Kills all remaining processes."""
        for pid in self.alive():
            send(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def send(pid: int, number: int) -> bool:
    """Returns False if the process no longer exists."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
