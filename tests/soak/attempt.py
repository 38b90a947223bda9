"""One start of a training under soak: its processes, what they have noted, and how they end."""

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

from helpers.runs import SMALL, VIT

SCRIPT = Path(__file__).with_name("observed.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--shutdown-timeout=5")
HANDED_ON = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGUSR2"  # else torchrun dies of the last two, alone
SAMPLES, BATCH = 250, 12  # most epochs begin and end within a step; 1, 2 and 3 ranks share it
# Small in all that costs time, and with all that is kept: state of each sample, AdamW, dropout's random numbers. 64
# bits, so that the order of summation is all that other ranks change, far below 1e-5 in the end.
TRAINING = (
    *SMALL,
    *VIT,
    "model.image.options={patch_size:16,embed_dim:32,depth:1,num_heads:2}",
    *("model.text.width=4", "model.text.layers=1"),
    *(f"data.samples={SAMPLES}", f"data.batch_size={BATCH}"),
    *("objective=fastclip_v3", "objective.rho=3", "precision=fp64", "distributed=cpu"),
    *("checkpoint.every=7st", "checkpoint.keep_last=3", "checkpoint.sync_timeout_s=60", "resume=auto"),
)
LONG_S = 240.0  # for the first step, and for an end; a quiet machine takes 5 s


class Unexpected(AssertionError):
    """What a run must not do."""


@dataclass(frozen=True)
class Note:
    """What one rank took in one step."""

    attempt: int
    rank: int
    step: int
    world: int
    samples: list[int]


class Notes:
    """The folder into which the processes of a training write them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    def pids(self, attempt: int) -> dict[int, int]:
        """By rank, of those that made a step."""
        names = (path.name.split(".") for path in self.folder.glob(f"{attempt:05d}.*"))
        return {int(rank): int(pid) for _, rank, pid in names}

    def read(self, attempt: int | None = None) -> Iterator[Note]:
        """In the order of attempts; a line that a kill cut is none."""
        pattern = "*" if attempt is None else f"{attempt:05d}.*"
        for path in sorted(self.folder.glob(pattern)):
            number, rank, _ = map(int, path.name.split("."))
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    yield Note(number, rank, **json.loads(line))

    def steps(self, attempt: int) -> list[int]:
        return sorted(note.step for note in self.read(attempt))


class Attempt:
    """`number`th start of the run in `run_dir`; as `ranks` of torchrun, or plain python where it is 0."""

    def __init__(self, run_dir: Path, notes: Notes, number: int, ranks: int, overrides: Sequence[str]) -> None:
        self.run_dir, self.notes, self.number, self.ranks = run_dir, notes, number, ranks
        self.log = run_dir.with_name(f"{run_dir.name}.{number:05d}.log")
        self._mark = f"CLIPX_SOAK_MARK={os.getpid()}.{notes.folder.parent.name}.{run_dir.name}.{number}"
        own = {"CLIPX_SOAK_NOTES": str(notes.folder), "CLIPX_SOAK_ATTEMPT": str(number), "OMP_NUM_THREADS": "1"}
        launcher = (*TORCHRUN, HANDED_ON, f"--nproc-per-node={ranks}") if ranks else ()
        command = (sys.executable, *launcher, str(SCRIPT), *TRAINING, *overrides, f"run_dir={run_dir}", "name=soak")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **own, "CLIPX_SOAK_MARK": self._mark.partition("=")[2]},
                stdout=log,
                stderr=log,
                cwd=run_dir.parent,
                start_new_session=True,  # the terminal's Ctrl-C is for the test
            )

    # ------------------------------------------------------------------------------------------------ looking

    @property
    def step(self) -> int:
        """The last that any rank noted, 0 before the first."""
        return max(self.notes.steps(self.number), default=0)

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def wait_for_steps(self, number: int) -> bool:
        """Whether all ranks made so many in this attempt; False where it ended before."""
        needed, end = number * max(self.ranks, 1), time.monotonic() + LONG_S
        while len(self.notes.steps(self.number)) < needed:
            if self.over:
                return False
            if time.monotonic() > end:
                raise Unexpected(f"step {number} of the attempt did not come in {LONG_S:g} s")
            time.sleep(0.05)
        return True

    def wait_s(self, seconds: float) -> None:
        """So long, or until it ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def rank_pids(self) -> list[int]:
        return [pid for _, pid in sorted(self.notes.pids(self.number).items())]

    def loader_pids(self) -> list[int]:
        """Of all ranks."""
        return [child for pid in self.rank_pids() for child in children(pid)]

    def alive(self) -> list[int]:
        """Every process that it started, whoever its parent is by now."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    # ------------------------------------------------------------------------------------------------- ending

    def end(self) -> tuple[int, list[int]]:
        """Waits for it; its exit code, and those that torchrun tells of its ranks. Raises where processes stay."""
        try:
            code = self.process.wait(LONG_S)
        except subprocess.TimeoutExpired:
            raise Unexpected(f"it did not end in {LONG_S:g} s") from None
        end = time.monotonic() + 30  # a loader process looks for its parent every 5 s
        while left := self.alive():
            for pid in left:
                send(pid, signal.SIGCONT)  # one that a fault stopped
            if time.monotonic() > end:
                raise Unexpected(f"processes {left} are left behind")
            time.sleep(0.2)
        return code, [int(text) for text in re.findall(r"^ *exitcode *: (-?\d+)", self.log.read_text(), re.M)]

    def destroy(self) -> None:
        """Whatever is left of it."""
        for pid in self.alive():
            send(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def children(pid: int) -> list[int]:
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def send(pid: int, number: int) -> bool:
    """False where there is no such process any more."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
