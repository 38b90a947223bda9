"""The trainer: build, step, fit. Explicit calls without callbacks; progress is counted in samples seen."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clipx.checkpoint.manager import CheckpointManager, check_storage
from clipx.checkpoint.resume import Resume
from clipx.config.duration import Duration, Length
from clipx.config.saved import flatten, to_dict
from clipx.data.bad_samples import BadSampleCounter, check_opened
from clipx.data.batch import Batch
from clipx.data.order import SampleOrder
from clipx.data.prefetch import DevicePrefetcher
from clipx.data.spec import Dataset, exchange_captions, training_order
from clipx.distributed.comm import Comm
from clipx.errors import Stopped
from clipx.evaluator.suite import Suite
from clipx.logger import Row, Sinks, open_sinks
from clipx.model.flops import Utilisation
from clipx.model.tokenizer import Tokenizer
from clipx.objective.base import Metrics
from clipx.optimizer.groups import set_learning_rate
from clipx.report.console import Screen
from clipx.run.directory import RunDir
from clipx.run.lock import RunLock
from clipx.run.signals import StopSignals
from clipx.run.watchdog import Watchdog
from clipx.schedule import LearningRate
from clipx.storage.traffic import NO_TRAFFIC
from clipx.teacher.live import Teacher
from clipx.teacher.stored import StoredTeachers
from clipx.trainer.backends import Backends, prepare_backends
from clipx.trainer.batches import check_loading, loader_pool, remaining_batches
from clipx.trainer.counters import counters, restore_counters
from clipx.trainer.early_stopping import EarlyStopping
from clipx.trainer.evaluation import PeriodicEvaluation
from clipx.trainer.from_open_clip import resume_from_open_clip
from clipx.trainer.learner import Learner, StepPosition
from clipx.trainer.metrics import Meter
from clipx.trainer.monitors import Monitors
from clipx.trainer.out_of_memory import report_out_of_memory
from clipx.trainer.profiler import Profiler
from clipx.trainer.saved_run import check_sources, finish_uploads, open_pinned_data, pin_normalization
from clipx.trainer.spec import RunSpec
from clipx.trainer.stages import StagePlan, check_ranks
from clipx.trainer.start import plan_run
from clipx.trainer.summary import (
    check_final_loss,
    end_for_lost_peer,
    facts,
    metrics_row,
    report_abort,
    report_profile,
    write_summary,
)

log = logging.getLogger(__name__)


class Trainer:
    """Trainer of one run. `Trainer(spec).fit()` trains, evaluates and writes everything to `spec.run_dir`."""

    spec: RunSpec
    comm: Comm
    backends: Backends
    dataset: Dataset
    order: SampleOrder
    bad_samples: BadSampleCounter
    traffic = NO_TRAFFIC  # of this rank's loader with remote storage, since the start of the process
    evaluation: PeriodicEvaluation
    early_stopping: EarlyStopping
    tokenizer: Tokenizer
    plan: StagePlan
    length: Length
    total: int  # samples of the run
    learning_rate: LearningRate
    learner: Learner  # model, objective, optimizer and their step
    stored: StoredTeachers | None
    teacher: Teacher | StoredTeachers | None
    utilisation: Utilisation | None
    rundir: RunDir
    lock: RunLock
    checkpoints: CheckpointManager
    monitors: Monitors
    sinks: Sinks
    profiler: Profiler
    meter: Meter
    stop: StopSignals
    watchdog: Watchdog
    resumed: bool
    loaded_weights: list[str]  # lines for the log about the initial weights
    notes: list[str]  # lines for the log about changes since the run last ran

    samples_seen: int = 0
    _log_period: int  # samples
    _open: contextlib.ExitStack  # resources that `close` releases

    def __init__(self, spec: RunSpec) -> None:
        """Builds all parts, and resumes as `spec.resume` specifies. Raises ClipxError before any training."""
        self.spec = spec
        prepare_backends(spec.deterministic)
        self.comm = spec.distributed.build()
        with contextlib.ExitStack() as self._open, self.comm.naming_lost_peers():
            self._open.callback(self.comm.leave)
            self.backends = Backends.configure(spec.deterministic, self.comm.device)
            self.comm.run_on_main(RunDir(Path(spec.run_dir)).check_files)
            check_storage(spec.checkpoint, spec.run_dir, spec.resume, self.comm)
            with report_out_of_memory(spec, self.comm):
                self._build_data()
                self._build_model()
                self._open_run()
            self._open = self._open.pop_all()

    def _build_data(self) -> None:
        spec, comm = self.spec, self.comm
        check_ranks(spec.stages, spec.data, comm.world)
        check_loading(spec, comm)
        pin_normalization(spec, comm)
        self.dataset = open_pinned_data(spec, comm)
        train = self.dataset.train
        # Name and directory may contain the time and differ between ranks; those of rank 0 are used.
        same = {key: value for key, value in to_dict(spec).items() if key not in ("name", "run_dir")}
        precision = spec.precision.on(comm.device).kind  # a job may have devices with and without bfloat16
        comm.require_equal(config=dict(flatten(same)), data=train.fingerprint, precision=precision)
        n = sum(train.sizes)
        check_opened(train.bad, n, spec.data.max_bad_share)
        self.plan, self.length = plan_run(spec, n)
        self.total = self.plan.total
        suite = Suite.open(spec.active_evaluators, spec.data, self.dataset, comm)
        self.order = training_order(spec.data, self.dataset, spec.seed, comm.world)
        self.dataset = exchange_captions(self.dataset, spec.data, spec.seed)
        self.bad_samples = BadSampleCounter(spec.data.max_bad_share, self.order.samples // comm.world, comm.world)
        self.learning_rate = self.plan.scaled(spec.schedule.build(spec.optimizer.lr, self.length))
        self.evaluation = PeriodicEvaluation(spec, suite, self.dataset.held_out, self.length, comm)
        self._log_period = max(1, Duration.parse(spec.log_every, "log_every").samples(self.length))

    def _build_model(self) -> None:
        spec, comm = self.spec, self.comm
        self.tokenizer = spec.model.text.build_tokenizer()
        self.learner = Learner(
            spec,
            comm,
            self.length,
            self.plan.varying,
            self.dataset.classes,
            report=self._warn,
            roll_back=self._roll_back,
            before_update=lambda: self.checkpoints.hold_updates(),
        )
        self.stored = spec.teacher.open(self.dataset.train, spec.data.view_options(), spec.objective.teacher_logits)
        self.teacher = self.stored or self.learner.teacher
        if self.teacher is not None:
            comm.require_equal(teacher=self.teacher.digest)
            spec.objective.check_teacher(self.teacher.widths, self.learner.weights.embed_dim)
        self.utilisation = Utilisation.build(spec.model, self.learner.format, comm.device, spec.device_peak_tflops)

    def _open_run(self) -> None:
        """Locks the run directory, and resumes or starts the run in it."""
        spec, comm = self.spec, self.comm
        self.rundir = RunDir(Path(comm.broadcast_object(spec.run_dir)))
        resume = Resume.parse(spec.resume)
        if resume.run_dir is not None and spec.checkpoint.remote is None:
            comm.run_on_main(self.rundir.must_exist)
        self.early_stopping = EarlyStopping(spec.early_stopping, self.rundir.path, comm)
        self.monitors = Monitors(self.learner.objective, self._warn, spec.data.captions_per_step)
        self.meter = Meter(comm)
        self.sinks = Sinks([], self.rundir.event)
        self.lock = self._open.enter_context(RunLock(self.rundir.path, comm, self.rundir.event))
        comm.follow(lambda: self.steps_done, lambda reason: end_for_lost_peer(self, reason))
        self.checkpoints = CheckpointManager(self.rundir.path, spec.checkpoint, self.length, comm, self.rundir.event)
        self._open.callback(self.checkpoints.close)
        self.checkpoints.fetch(resume)
        self.notes = comm.run_on_main(lambda: self.rundir.claim(spec))
        self.resumed = self._resume(resume)
        self.loaded_weights = [] if self.resumed else self._begin(resume.open_clip)
        self.profiler = Profiler(spec.profiler, self.rundir.path / "profile", comm)
        self._open.callback(self.profiler.close)
        comm.run_on_main(lambda: self.rundir.save_config(spec))
        self.checkpoints.open()
        if comm.is_main:
            for source in filter(None, (self.dataset.train, self.dataset.held_out, *self.evaluation.suite.sources)):
                self.rundir.quarantine(source.bad)

    def _begin(self, training: str | None) -> list[str]:
        """Loads initial weights, or a checkpoint of open_clip's trainer, into a new run. Returns lines for the log."""
        if training is None:
            return self.learner.load_initial_weights()
        self.samples_seen, begun = resume_from_open_clip(training, self.learner, self.plan, self.order.samples)
        return begun

    def _warn(self, kind: str, message: str, *, logged: bool = True, **facts: Any) -> None:
        """Records a warning in events.jsonl on rank 0, and logs it unless an error repeats it. Call it on all ranks."""
        if self.comm.is_main:
            log.log(logging.WARNING if logged else logging.DEBUG, message)
            self.rundir.event(kind, message=message, **facts)

    def step(self, batch: Batch) -> Metrics:
        """Makes one optimizer step on this rank's share of a global batch, on the device, with the settings at
        `samples_seen`. Returns the metrics of `Learner.step`, in detail for a logged step. Collective."""
        before = self.samples_seen
        after = before + self.plan.at(before).batch_size
        set_learning_rate(self.learner.optimizer, self.learning_rate(before))
        self.learner.model.image.set_patch_dropout(self.plan.patch_dropout(before))
        metrics = self.learner.step(batch, StepPosition(self.steps_done, before, after), self._is_logged(before))
        self.samples_seen = after
        return metrics

    def _roll_back(self) -> int | None:
        """Restores the newest checkpoint, but not the position in the data. Returns its step, or None without one."""
        found = self.checkpoints.load()
        if found is None:
            return None
        self.learner.state.restore(found, self.spec.seed + 1 + self.samples_seen)
        return found.step

    @property
    def steps_done(self) -> int:
        return self.plan.steps(self.samples_seen)

    @property
    def steps_total(self) -> int:
        return self.plan.steps(self.total)

    def fit(self) -> dict[str, float]:
        """Trains to the end of `spec.duration`, evaluates and writes the report. Returns the final metrics by name.

        Raises Stopped if a signal stopped the run before, NotSynced if the upload to `checkpoint.remote` is not
        complete.
        """
        spec, comm, screen = self.spec, self.comm, Screen(self.comm.is_main)
        with (
            Watchdog(spec.distributed.watchdog_s, self.rundir.path, comm.rank, self.rundir.event) as self.watchdog,
            screen,
            StopSignals(verbose=comm.is_main) as self.stop,  # first: SIGTERM must not end a search for a lost rank
            contextlib.closing(self),  # files and lock, which a signal must not leave
            report_abort(self),
            comm.naming_lost_peers(),
            report_out_of_memory(spec, comm),
            loader_pool(self),
        ):
            comm.run_on_main(self._open_sinks)
            for name, text in facts(self).items():
                screen.print(f"{name:8} {text}")
            final = self._finish(screen, self._loop(screen))
            comm.barrier()
            comm.leave()  # the run is complete: from here on no rank needs another
            finish_uploads(self.checkpoints, spec.checkpoint)
            self.watchdog.beat(self.steps_done)
        return final

    def _open_sinks(self) -> None:
        spec, run, step = self.spec, self.rundir, self.steps_done
        self.sinks = open_sinks(spec.logger, run.path, spec.name, to_dict(spec), step, run.event)
        run.started(step, self.comm.world)

    def close(self) -> None:
        """Closes all files and unlocks the run directory. `fit` calls it; call it for a trainer that is not fitted."""
        self.sinks.close()
        self._open.close()

    def _loop(self, screen: Screen) -> dict[str, float]:
        """Trains to the end. Returns the metrics of the evaluation after the last step, if it has run already."""
        first, started = self.steps_done, self.samples_seen
        if numbers := self._evaluate(screen):
            screen.evaluation(first, numbers)
        if self.early_stopping.ends_after(numbers, logged=True):
            return numbers
        meter = self.meter
        self.profiler.before(first + 1)
        for before in self.steps():
            with meter.pausing():
                report_profile(self, screen)
            self.watchdog.beat(self.steps_done)
            if before == started:
                self.checkpoints.reserve(self.learner.state.capture())
            if self._is_logged(before):
                self.learner.settle()
                row = metrics_row(self, meter.read(), before)
                self._log(row)
                self.monitors.check(self.steps_done, row)
                screen.progress(row, first, self.steps_total)
            if self.samples_seen >= self.total:
                break
            with meter.pausing():
                numbers = self._between_steps(screen, before)
            if self.early_stopping.ending:
                return numbers
            self.profiler.before(self.steps_done + 1)
        return {}

    def steps(self) -> Iterator[int]:
        """Makes the steps to the end of the run, and adds each to `meter`. Yields the samples seen before each."""
        batches = DevicePrefetcher(self._batches(), self.comm.device)
        for batch in self.meter.waiting(batches):
            before = self.samples_seen
            self._count(batch)
            with self.meter.phase("step"):
                metrics = self.step(batch)
            with self.meter.phase("data_wait"):
                batches.start_next()
            tokens, found_inf = batch.text_tokens, self.learner.non_finite.found_inf
            self.meter.add(metrics, self.samples_seen - before, tokens, found_inf, batch.image_tokens)
            yield before

    def _is_logged(self, before: int) -> bool:
        """Returns whether the step that starts at sample `before` is logged."""
        after = before + self.plan.at(before).batch_size
        return after >= self.total or after // self._log_period > before // self._log_period

    def _between_steps(self, screen: Screen, before: int) -> dict[str, float]:
        """Runs the evaluations and saves the checkpoints due after the step from sample `before`. Returns metrics."""
        self.evaluation.add_due(before, self.samples_seen)
        self.lock.check()
        if signal := self.stop.received_by_any(self.comm):  # at once: overdue evaluations run when the run resumes
            self._stop(signal)
        numbers: dict[str, float] = {}
        if self.evaluation.overdue:
            numbers = self._evaluate(screen)
            screen.evaluation(self.steps_done, numbers)
        if self.early_stopping.ends_after(numbers, self._is_logged(before)):
            return numbers
        due = self.checkpoints.due(before, self.samples_seen)
        if self.checkpoints.is_new_best(numbers) or due:
            with self.meter.phase("checkpoint"):
                self._save(numbers)
        return numbers

    def _stop(self, signal: str) -> None:
        """Saves a checkpoint and raises Stopped."""
        on = self.checkpoints.enabled
        if on:
            self._save({})
            self.checkpoints.wait()
        if self.comm.is_main:
            self.rundir.event("stopped", step=self.steps_done, signal=signal, saved=on)
        self.comm.barrier()
        try:
            self.stop.call_previous_handler(self.comm)
        finally:
            self.checkpoints.wait_for_uploads()
        saved = f"saved; continue with resume={self.rundir.path}" if on else "not saved, since checkpoint.every=none"
        raise Stopped(f"{signal}: stopped after step {self.steps_done:,} of {self.steps_total:,}, {saved}")

    def _batches(self) -> Iterator[Batch]:
        """Yields the batches from the current position to the end of the run."""
        return remaining_batches(self)

    def _count(self, batch: Batch) -> None:
        if batch.bad:
            self.rundir.quarantine(batch.bad)
        self.bad_samples.count(len(batch.index), batch.bad)
        self.traffic = self.traffic.plus(batch.traffic)

    def _finish(self, screen: Screen, numbers: dict[str, float]) -> dict[str, float]:
        self.stop.finish()
        self.early_stopping.announce(screen.print, self.rundir.event, self.steps_done)
        self.evaluation.add_at_end(numbers)
        numbers = numbers | self._evaluate(screen)
        bad = BadSampleCounter.sum(self.comm.gather_objects(self.bad_samples))
        if self.checkpoints.at_end:
            self._save(numbers)
            self.checkpoints.wait()
        if self.comm.is_main:
            numbers = write_summary(self, numbers, bad, screen)
        self.comm.run_on_main(self.rundir.check)
        return check_final_loss(self, self.comm.broadcast_object(numbers))

    def _evaluate(self, screen: Screen) -> dict[str, float]:
        """Runs the evaluators that are due and logs their metrics. Returns the metrics by name."""
        if not self.evaluation.overdue:
            return {}
        start = time.perf_counter()
        self.learner.settle()
        beat, progress = lambda: self.watchdog.beat(self.steps_done), screen.loops.named("evaluation")
        numbers = self.evaluation.run(self.learner, self.rundir.quarantine, beat, progress)
        seconds = {"evaluation_s": time.perf_counter() - start}
        self._log({**metrics_row(self, seconds, self.samples_seen), **numbers})
        return numbers

    def _log(self, row: Row) -> None:
        """Logs a row. Raises DiskError on all ranks if the run directory is gone. Collective."""
        self.comm.run_on_main(self.rundir.check)
        self.sinks.log(row)

    def _save(self, numbers: dict[str, float]) -> None:
        """Saves a checkpoint of the current state. `numbers`: metrics of the evaluation just run. Collective."""
        self.comm.run_on_main(self.rundir.check)
        self.learner.settle()
        state = counters(self)
        tensors = self.learner.state.capture()
        until_update = self.learner.state.changed_by_updates(tensors)
        self.checkpoints.save(self.steps_done, tensors, state, numbers, until_update)

    def _resume(self, resume: Resume) -> bool:
        """Restores the state from a checkpoint. Returns whether there is one. Raises CheckpointError."""
        found = self.checkpoints.find(resume)
        if found is None:
            return False
        spec, teacher = self.spec, None if self.teacher is None else self.teacher.digest
        source = spec.teacher.source_option
        check_sources(found.state, self.rundir.path, self.dataset.train.fingerprint, teacher, source)
        streams = found.state.get("streams")
        self.order = training_order(spec.data, self.dataset, spec.seed, self.comm.world, streams)
        restore_counters(self, found)
        self.notes += self.learner.restore(found, spec.seed + 1 + self.samples_seen)
        return True
