"""A minimal training loop with the code that stops and watches a run, on any number of ranks.

    stop_loop.py run_dir=FOLDER name=FAULT [distributed.…=…]

Each rank writes `pid.RANK` and the step that it saved, rank 0 the steps done. FAULT is none or: `slow`, saving ends when
the file `release` exists, and signals that come when `later` exists are no repeats of the first; `requeue`, the same,
SIGUSR2 has a previous handler, and a rank that saves writes the signal that it has received; `fail`, rank 1 raises an
error; `stuck`, rank 1 blocks for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import FrameType, SimpleNamespace

import torch

from clipx.abort import abort
from clipx.cli import cli
from clipx.distributed.comm import Comm
from clipx.errors import DataError, Exit, Stopped
from clipx.run import signals
from clipx.run.directory import RunDir
from clipx.run.lock import RunLock
from clipx.run.signals import StopSignals
from clipx.run.watchdog import Watchdog, watch_launcher
from clipx.trainer.spec import RunSpec


class Loop:
    def __init__(self, spec: RunSpec, comm: Comm) -> None:
        self.folder, self.fault = Path(spec.run_dir), spec.name
        self.spec, self.comm, self.step = spec, comm, 0
        self.rundir = RunDir(self.folder)

    def run(self) -> None:
        if self.fault == "requeue":
            signal.signal(signal.SIGUSR2, self.requeue)
        if self.fault == "slow":
            later = self.folder / "later"
            clock = SimpleNamespace(monotonic=lambda: 2 * signals._DUPLICATE_S * later.exists(), sleep=time.sleep)
            signals.time = clock  # type: ignore[assignment, attr-defined]
        comm, run = self.comm, self.folder
        lock = RunLock(run, self.rundir.event)
        comm.follow(lambda: self.step, lambda reason: abort(reason, Exit.FAILED, rank=comm.rank))
        comm.run_on_main(lock.acquire)
        with (
            contextlib.ExitStack() as at_end,
            StopSignals(verbose=comm.is_main) as stop,
            Watchdog(self.spec.distributed.watchdog_s, run, comm.rank, self.rundir.event) as watchdog,
            comm.naming_lost_peers(),
        ):
            at_end.callback(lock.release)
            (run / f"pid.{comm.rank}").write_text(str(os.getpid()))
            while True:
                lock.check()
                self.inject_fault()
                assert comm.sum(torch.ones(2)).tolist() == [comm.world] * 2
                self.step += 1
                watchdog.beat(self.step)
                self.write("step", self.step)
                time.sleep(0.01)
                if name := stop.received_by_any(comm):
                    self.save(stop)
                    self.rundir.event("stop", signal=name, own=stop.received, rank=comm.rank)
                    stop.call_previous_handler(comm)
                    raise Stopped(f"{name} at step {self.step}; saved: go on with resume=auto")

    def inject_fault(self) -> None:
        if self.comm.rank == 1 and self.step == 20:
            if self.fault == "fail":
                raise DataError("the shard is gone: bring it back")
            if self.fault == "stuck":
                time.sleep(1000)

    def save(self, stop: StopSignals) -> None:
        if self.fault in ("slow", "requeue"):
            end = time.monotonic() + 600
            while not (self.folder / "release").exists() and time.monotonic() < end:
                self.write("received", stop.received)
                time.sleep(0.02)
        self.write("saved", self.step)
        self.comm.barrier()

    def write(self, name: str, value: object) -> None:
        path = self.folder / f"{name}.{self.comm.rank}"
        path.with_name(f"{path.name}.tmp").write_text(str(value))
        path.with_name(f"{path.name}.tmp").replace(path)

    def requeue(self, number: int, frame: FrameType | None) -> None:
        assert (self.folder / "saved.0").is_file()
        with (self.folder / "requeued").open("a") as file:
            file.write(f"{self.comm.rank} {signal.Signals(number).name}\n")


def main(spec: RunSpec) -> None:
    with spec.distributed.joined() as comm:
        Loop(spec, comm).run()


if __name__ == "__main__":
    watch_launcher()
    cli(main, "train")()
