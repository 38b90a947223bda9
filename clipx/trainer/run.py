"""A run on its machine: directory, lock, checkpoints, loggers, events, signals and watchdog."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from clipx.abort import abort
from clipx.checkpoint.manager import CheckpointManager
from clipx.config.saved import to_dict
from clipx.data.bad_samples import BadCount
from clipx.data.source import BadRecord
from clipx.errors import ClipxError, NotSynced, PeerLost, Stopped, disk_failure
from clipx.logger import Row, Sinks, open_sinks, read_rows
from clipx.report.console import Screen
from clipx.report.figure import attempt
from clipx.run.directory import RunDir
from clipx.run.lock import RunLock
from clipx.run.signals import StopSignals
from clipx.run.watchdog import Watchdog
from clipx.storage.jsonl import read_objects
from clipx.trainer.profiler import Profiler

if TYPE_CHECKING:
    from clipx.checkpoint.format import Checkpoint
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.trainer.spec import RunSpec

log = logging.getLogger(__name__)


class Run:
    """Everything of a run outside its numbers: what it writes, and what may end it.

    `step` is the number of finished steps, for errors and events. `facts` has the lines that describe the run, by
    heading. All ranks call its methods in the same order; files are written by rank 0.
    """

    lock: RunLock
    checkpoints: CheckpointManager
    screen: Screen
    signals: StopSignals
    watchdog: Watchdog

    def __init__(self, spec: RunSpec, comm: Comm) -> None:
        self.spec, self.comm = spec, comm
        self.dir = RunDir(Path(spec.run_dir))
        self.sinks = Sinks([], self.dir.event)
        self.profiler = Profiler(spec.profiler, self.dir.path / "profile", comm)
        self.step, self.facts = 0, dict[str, str]()
        self._open = contextlib.ExitStack()  # what `close` releases
        self._open.callback(comm.leave)
        self._open.callback(self.profiler.close)

    def open(self, length: Length) -> list[str]:
        """Locks the directory, and fetches and compares the run in it. Returns a line for each changed option.

        Writes nothing but the lock. Collective. Raises CheckpointError if the directory holds another run.
        """
        spec, comm, resume = self.spec, self.comm, self.spec.resume_point
        if resume.run_dir is not None and spec.checkpoint.remote is None:
            comm.run_on_main(self.dir.must_exist)
        self.lock = RunLock(self.dir.path, self.dir.event)
        self._open.callback(self.lock.release)
        comm.run_on_main(self.lock.acquire)
        comm.follow(lambda: self.step, self._end_for_lost_peer)
        self.checkpoints = CheckpointManager(self.dir.path, spec.checkpoint, length, comm, self.dir.event)
        self._open.callback(self.checkpoints.close)
        self.checkpoints.fetch(resume)
        notes: list[str] = comm.run_on_main(lambda: self.dir.claim(spec))
        return notes

    def find_checkpoint(self) -> Checkpoint | None:
        """Loads the checkpoint from which the run resumes. None: it is new. Collective. Raises CheckpointError."""
        return self.checkpoints.find(self.spec.resume_point)

    def begin(self, bad: Sequence[Sequence[BadRecord]]) -> None:
        """Writes config.yaml, and `bad`: the samples that were unusable when each source was opened. Collective."""
        self.comm.run_on_main(lambda: self.dir.save_config(self.spec))
        self.checkpoints.open()
        if self.comm.is_main:
            for records in bad:
                self.dir.quarantine(records)

    def close(self) -> None:
        """Closes all files and unlocks the run directory. A second call does nothing."""
        self.sinks.close()
        self._open.close()

    # ---------------------------------------------------------------------------------------------------- training

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Context of the training: ends it when it stalls, lets signals stop it, and closes the run.

        An error that ends it is recorded, other ranks learn of it, and it remains an error.
        """
        spec, comm = self.spec, self.comm
        self.screen = Screen(comm.is_main)
        with (
            Watchdog(spec.distributed.watchdog_s, self.dir.path, comm.rank, self.dir.event) as self.watchdog,
            self.screen,
            StopSignals(verbose=comm.is_main) as self.signals,  # first: SIGTERM must not end a search for a lost rank
            contextlib.closing(self),  # files and lock, which a signal must not leave
            self._recording_the_end(),
            comm.naming_lost_peers(),
        ):
            yield

    def start(self) -> None:
        """Opens the loggers and prints the facts. Call it in `training`, after loader processes forked. Collective."""
        self.comm.run_on_main(self._open_sinks)
        for name, text in self.facts.items():
            self.screen.print(f"{name:8} {text}")

    def _open_sinks(self) -> None:
        spec = self.spec
        self.sinks = open_sinks(spec.logger, self.dir.path, spec.name, to_dict(spec), self.step, self.dir.event)
        self.dir.started(self.step, self.comm.world, self.comm.device.type)

    def beat(self, step: int) -> None:
        """Reports progress to the watchdog. `step`: number of finished steps."""
        self.step = step
        self.watchdog.beat(step)

    def log(self, row: Row) -> None:
        """Logs a row. Raises DiskError on all ranks if the run directory is gone. Collective."""
        self.check()
        self.sinks.log(row)

    def check(self) -> None:
        """Raises DiskError on all ranks if the run directory is gone. Collective."""
        self.comm.run_on_main(self.dir.check)

    def warn(self, kind: str, message: str, *, logged: bool = True, **facts: Any) -> None:
        """Records a warning in events.jsonl on rank 0, and logs it unless an error repeats it. Call it on all ranks."""
        if self.comm.is_main:
            log.log(logging.WARNING if logged else logging.DEBUG, message)
            self.dir.event(kind, message=message, **facts)

    def show_profile(self) -> None:
        """Prints the time breakdown of the profiled steps after the last of them."""
        if found := self.profiler.after(self.step):
            self.dir.event("profile", **found)
            parts = "  ".join(f"{name.removesuffix('_ms')} {found[name]:.3g}" for name in found if name != "steps")
            self.screen.print(f"profile  ms: {parts}; {self.dir.path / 'profile'}")

    # --------------------------------------------------------------------------------------------------------- end

    def finish(self, numbers: dict[str, float], bad: Sequence[BadCount], ending: Mapping[str, str]) -> dict[str, float]:
        """Writes the report of a finished run and prints its table. Returns the final metrics. Call it on rank 0 only.

        Args:
            numbers: metrics of the last evaluation.
            bad: bad samples by reason.
            ending: facts about an early end; empty without.
        """
        screen, limit = self.screen, self.spec.max_final_loss
        rows = attempt("reading metrics.jsonl", lambda: read_rows(self.dir.metrics), self._warn_of_report)
        last = next((row for row in reversed(rows or []) if "train/loss" in row), {})
        numbers = {**{k: v for k, v in last.items() if k in ("step", "samples", "epoch", "train/loss")}, **numbers}
        written = rows and attempt("the report", lambda: self._report(rows, numbers, bad), self._warn_of_report)
        if "train/requests_per_sample" in last:
            requests, received = last["train/requests_per_sample"], last["train/bytes_per_sample"]
            screen.print(f"storage  {requests:.3g} requests and {received:,.0f} bytes per sample")
        for count in bad:
            self.dir.event("bad_samples", reason=count.reason, samples=count.samples, draws=count.draws)
            screen.print(f"bad      {count}")
        self.dir.event("end", step=self.step, **ending)
        if limit is not None and numbers.get("train/loss", math.inf) <= limit:
            screen.print(f"reached  train/loss={numbers['train/loss']:.4g}, at most max_final_loss={limit:g}")
        attempt("the table of results", lambda: screen.table(self.spec.name, numbers), self._warn_of_report)
        files = [*(["report.html", "report.png"] if written else []), "metrics.jsonl"]
        files += ["checkpoints/"] if self.checkpoints.enabled else []
        screen.print(f"run directory {self.dir.path}: {', '.join(files)}")
        return numbers

    def finish_uploads(self) -> None:
        """Waits for the uploads at the end of a run. Raises NotSynced if they are incomplete then. Collective."""
        if not self.checkpoints.wait_for_uploads():
            raise NotSynced(
                f"the run is finished, but its upload to {self.checkpoints.url} is incomplete after "
                f"checkpoint.sync_timeout_s={self.spec.checkpoint.sync_timeout_s:g}: all local files are complete; "
                "once the storage is reachable, the same command with resume=auto uploads the rest"
            )

    @contextlib.contextmanager
    def _recording_the_end(self) -> Iterator[None]:
        """Records an error or a stop that ends the run, and writes the report up to there. The error remains an error.

        A failure of a disk says what is saved.
        """
        try:
            yield
        except Exception as raised:
            saved = "the run saves no checkpoints"
            if self.checkpoints.enabled:
                saved = "its complete checkpoints remain: continue with resume=auto"
            error = raised if isinstance(raised, ClipxError) else disk_failure(raised, saved) or raised
            kind = "" if isinstance(error, ClipxError) else f"{type(error).__name__}: "
            self._record_end(None if isinstance(error, Stopped) else kind + " ".join(str(error).split()))
            if error is raised:
                raise
            raise error from raised

    def _end_for_lost_peer(self, reason: str) -> NoReturn:
        """Ends this process for the loss of another rank: on rank 0 the run is recorded as failed, and unlocked."""

        def close(reason: str, _code: int) -> None:
            self._record_end(reason)
            self.sinks.close()
            self.lock.release()

        abort(reason, PeerLost.exit_code, close, rank=self.comm.rank)

    def _record_end(self, failure: str | None) -> None:
        """Records, on rank 0, why the run ends before its end, and writes the report up to here.

        Writes nothing if another job has the lock, which it may take over from a job that is suspended.
        """
        if self.comm.is_main and self.lock.is_held:
            if failure is not None:
                self.dir.event("failed", step=self.step, message=failure)
            attempt("the report", lambda: self._report(read_rows(self.dir.metrics)), self._warn_of_report)

    def _report(
        self, rows: Sequence[Row], final: Mapping[str, float] | None = None, bad: Sequence[BadCount] = ()
    ) -> bool:
        """Writes the report. Returns False for `report=false`. `final`: by default the last value of each metric."""
        if not self.spec.report:
            return False
        from clipx.report.run_report import RunRecord, write_report  # at the end, and only for report=true

        if final is None:
            final = {name: value for row in rows for name, value in row.items()}
        lines = {name: text for name, text in self.facts.items() if name not in ("resumed", "changed")}
        config, events = self.dir.config.read_text(encoding="utf-8"), read_objects(self.dir.events)
        record = RunRecord(
            name=self.spec.name, rows=rows, final=final, config=config, events=events, facts=lines, bad=bad
        )
        write_report(self.dir.path, record)
        return True

    def _warn_of_report(self, message: str) -> None:
        self.warn("report_failed", message)
