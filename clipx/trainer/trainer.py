"""The trainer: build, step, fit. Explicit calls, no callbacks; progress is counted in samples seen."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from clipx.checkpoint.manager import CheckpointManager
from clipx.checkpoint.resume import Resume
from clipx.config.duration import Cadence, Duration, Length
from clipx.config.saved import to_dict
from clipx.data.bad_samples import BadSampleCounter, check_bad_share
from clipx.data.loader import Batch, ImageView, train_loader, worker_deaths_as_errors
from clipx.data.order import SampleOrder
from clipx.data.spec import Dataset, open_on_all_ranks
from clipx.distributed.comm import Comm
from clipx.distributed.heartbeat import peers_told
from clipx.errors import CheckpointError, NotSynced, Stopped, require
from clipx.evaluator.base import Embedder
from clipx.evaluator.suite import Suite
from clipx.logger import Jsonl, Row, Sinks, read_rows
from clipx.model.clip import CLIP
from clipx.model.flops import Utilisation
from clipx.model.tokenizer import Tokenizer
from clipx.objective.base import Metrics, Objective
from clipx.optimizer.groups import set_learning_rate
from clipx.precision.spec import Precision
from clipx.report.console import Screen
from clipx.report.run_report import write_report
from clipx.run.directory import RunDir, flatten
from clipx.run.lock import RunLock
from clipx.run.signals import Stop
from clipx.run.watchdog import Watchdog
from clipx.schedule import LearningRate
from clipx.teacher.live import Teacher
from clipx.teacher.stored import StoredEmbeddings
from clipx.trainer.ema import WeightAverage
from clipx.trainer.from_open_clip import take_over
from clipx.trainer.gradcache import NotFiniteError
from clipx.trainer.learner import Learner
from clipx.trainer.metrics import Meter, tokens_computed
from clipx.trainer.monitors import Alarms
from clipx.trainer.nonfinite import NonFiniteSteps
from clipx.trainer.profiler import Profiler
from clipx.trainer.spec import RunSpec
from clipx.trainer.stages import StagePlan, check_ranks
from clipx.trainer.summary import facts

log = logging.getLogger(__name__)

_EMBEDDED = 256  # images at a time, for an objective with a head


class Trainer:
    """One run. `Trainer(spec).fit()` trains, evaluates and leaves everything in `spec.run_dir`."""

    spec: RunSpec
    comm: Comm
    dataset: Dataset
    suite: Suite
    order: SampleOrder
    tokenizer: Tokenizer
    plan: StagePlan
    stored: StoredEmbeddings | None
    teacher: Teacher | StoredEmbeddings | None
    learner: Learner  # has the next five, and their state
    model: CLIP
    average: WeightAverage | None
    precision: Precision
    objective: Objective
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    rundir: RunDir
    checkpoints: CheckpointManager
    resumed: bool
    begun: list[str]  # of the weights that the run began with
    notes: list[str]  # what is not as it was when the run last ran

    samples_seen: int = 0
    total: int  # samples to be seen
    length: Length

    def __init__(self, spec: RunSpec) -> None:
        """Builds everything, resumes where `spec.resume` says so. Raises ClipxError before any training."""
        self.spec = spec
        self.comm = spec.distributed.build()
        self._build_data()
        self._build_model()
        self._open_run()

    # ---------------------------------------------------------------------------------------------- building

    def _build_data(self) -> None:
        spec, comm = self.spec, self.comm
        batch = spec.data.batch_size
        spec.data.check_ranks(comm.world)
        check_ranks(spec.stages, spec.data, comm.world)
        self.dataset = open_on_all_ranks(spec.data, comm)
        train = self.dataset.train
        # The name, and with it the directory, may tell the time; rank 0's hold.
        same = {key: value for key, value in to_dict(spec).items() if key not in ("name", "run_dir")}
        comm.agree(config=dict(flatten(same)), data=train.fingerprint)
        n = sum(train.sizes)
        check_bad_share(len(train.bad), n + len(train.bad), spec.data.max_bad_share, train.bad[:1])
        require(
            batch <= n,
            f"data.batch_size={batch} is larger than the data set of {n:,} samples: use at most {n} or more data",
        )
        active = {name: e for name, e in spec.evaluator.items() if e.every != "none"}
        self.suite = Suite.open(active, spec.data, self.dataset, comm)
        self.order = spec.data.order(train, spec.seed)
        self.bad_samples = BadSampleCounter(spec.data.max_bad_share, self.order.samples // comm.world)
        total = Duration.parse(spec.duration, "duration").samples(Length(n, batch))
        require(total >= batch, f"duration={spec.duration} is less than one step of {batch} samples: train longer")
        self.plan = StagePlan.build(spec.stages, spec.model, spec.data, spec.duration, Length(n, batch, total))
        self.total = self.plan.total
        self.length = length = Length(n, batch, self.total)
        spec.schedule.check_fits(spec.duration, length)
        self.learning_rate = self.plan.scaled(spec.schedule.build(spec.optimizer.lr, length))
        self._cadences = {
            name: Cadence.parse(e.every, f"evaluator.{name}.every", length) for name, e in spec.evaluator.items()
        }
        self._log_period = max(1, Duration.parse(spec.log_every, "log_every").samples(length))

    def _build_model(self) -> None:
        spec, comm = self.spec, self.comm
        self.tokenizer = spec.model.text.build_tokenizer()
        self.learner = learner = Learner(spec, comm, self.length, self.plan.varying, self.dataset.classes)
        self.stored = spec.teacher.open(self.dataset.train)
        self.teacher = self.stored or learner.teacher
        if self.teacher is not None:
            comm.agree(teacher=self.teacher.digest)
        self.model, self.average, self.precision = learner.model, learner.average, learner.precision
        self.objective, self.optimizer = learner.objective, learner.optimizer
        self.utilisation = Utilisation.build(spec.model, spec.precision, comm.device, spec.device_peak_tflops)

    def _open_run(self) -> None:
        """Takes the run directory, and goes on from what is in it."""
        spec, comm = self.spec, self.comm
        self.rundir = RunDir(Path(comm.from_main(spec.run_dir)))
        resume = Resume.parse(spec.resume)
        if resume.run_dir is not None and spec.checkpoint.remote is None:
            comm.on_main(self.rundir.must_exist)
        self.alarms = Alarms(self.objective, self._warn)
        self.non_finite = NonFiniteSteps(spec.optimizer, self.model, self._warn, self.learner.loss_scale.on)
        self._open = contextlib.ExitStack()  # what `close` closes
        self._open.enter_context(self.learner.compiled_loss())
        self.sinks = Sinks([], self.rundir.event)
        self._overdue: list[str] = []  # evaluators that the run stopped before
        try:
            self.lock = self._open.enter_context(RunLock(self.rundir.path, comm, self.rundir.event))
            self.checkpoints = CheckpointManager(
                self.rundir.path, spec.checkpoint, self.length, comm, self.rundir.event
            )
            self._open.callback(self.checkpoints.close)
            self.checkpoints.fetch(resume)
            self.notes = comm.on_main(lambda: self.rundir.claim(spec))
            self.resumed = self._resume(resume)
            self.begun = [] if self.resumed else self._begin(resume.open_clip)
            spec.profiler.check_fits(self.steps_total)
            self.profiler = Profiler(spec.profiler, self.rundir.path / "profile", comm)
            self._open.callback(self.profiler.close)
            comm.on_main(lambda: self.rundir.keep(spec))
            self.checkpoints.open()
            if comm.is_main:
                for source in filter(None, (self.dataset.train, self.dataset.held_out, *self.suite.sources)):
                    self.rundir.quarantine(source.bad)
        except BaseException:
            self._open.close()
            raise

    def _begin(self, training: str | None) -> list[str]:
        """Gives a new run its first weights, or all that open_clip's trainer had learned. Returns what the log says."""
        if training is None:
            return self.learner.start()
        self.samples_seen, begun = take_over(training, self.learner, self.plan, self.order.samples)
        return begun

    def _warn(self, kind: str, message: str, **facts: Any) -> None:
        """An event that a person should hear of; every rank knows of it."""
        if self.comm.is_main:
            log.warning(message)
            self.rundir.event(kind, message=message, **facts)

    # ---------------------------------------------------------------------------------------------- the step

    def step(self, batch: Batch) -> Metrics:
        """One optimizer step on this rank's share of a global batch, on the device. Returns 0-dim tensors, unread.

        Where the step is logged with the norms of each tower, which take a copy of the weights. None of them where the
        loss or the gradient was not finite and `optimizer.non_finite` lets the run go on.
        """
        watched = self._is_logged(self.samples_seen)
        set_learning_rate(self.optimizer, self.learning_rate(self.samples_seen))
        self.model.image.set_patch_dropout(self.plan.patch_dropout(self.samples_seen))
        self.objective.before_step(self.samples_seen)
        self.non_finite.before()
        metrics: Metrics = {}
        try:
            metrics = self.learner.gradients(batch, watched, self.non_finite.undo)
            metrics |= self.learner.update(watched)
            self.non_finite.made()
        except NotFiniteError as error:
            self.non_finite.leave_out(self.steps_done, str(error), self._roll_back)
        self.samples_seen += self.plan.at(self.samples_seen).batch_size
        self.learner.settle(bool(metrics), self.samples_seen)
        return metrics

    def _roll_back(self) -> int | None:
        """To the weights of the newest checkpoint; the data goes on. Its step, or None where there is none."""
        found = self.checkpoints.load()
        if found is None:
            return None
        self.learner.state.restore(found, self.spec.seed + 1 + self.samples_seen)
        return found.step

    # --------------------------------------------------------------------------------------------- the run

    @property
    def steps_done(self) -> int:
        return self.plan.steps(self.samples_seen)

    @property
    def steps_total(self) -> int:
        return self.plan.steps(self.total)

    def fit(self) -> dict[str, float]:
        """Trains to the end of `spec.duration`, evaluates, reports. Returns the final numbers by name.

        Raises Stopped where a signal ended the run before, NotSynced where checkpoints are not all at
        `checkpoint.remote`.
        """
        spec, comm = self.spec, self.comm
        if comm.is_main:
            config, step = to_dict(spec), self.steps_done
            built = [logger.build(self.rundir.path, spec.name, config, step) for logger in spec.logger.values()]
            self.sinks = Sinks([Jsonl(self.rundir.metrics, step), *built], self.rundir.event)
        screen = Screen(comm.is_main)
        for name, text in facts(self).items():
            screen.print(f"{name:8} {text}")
        if comm.is_main:
            self.rundir.event("start", step=self.steps_done, world=comm.world)
        try:
            with (
                screen,
                peers_told(comm, lambda: self.steps_done),
                worker_deaths_as_errors(),
                Stop(tell=comm.is_main) as self.stop,
                self._watchdog() as self.watchdog,
            ):
                self._loop(screen)
                final = self._finish(screen)
                comm.barrier()
                if not self.checkpoints.wait_for_uploads():
                    raise NotSynced(
                        f"the run is finished, but not all of it is at {self.checkpoints.url} after checkpoint."
                        f"sync_timeout_s={spec.checkpoint.sync_timeout_s:g}: nothing here is lost; once the storage is "
                        "back, the same command with resume=auto sends the rest"
                    )
        finally:
            self.close()
        return final

    def close(self) -> None:
        """Gives the run directory back. For a trainer that is not fitted; `fit` does it at its end."""
        self.sinks.close()
        self._open.close()

    def _loop(self, screen: Screen) -> None:
        first, started = self.steps_done, self.samples_seen
        if self._overdue:
            screen.evaluation(first, self._evaluate())
        self.meter = meter = Meter(self.comm)
        self.profiler.before(first + 1)
        for batch in meter.waiting(self._batches()):
            before = self.samples_seen
            self._count(batch)
            with meter.phase("step"):
                metrics = self.step(batch.to(self.comm.device))
            meter.add(metrics, self.samples_seen - before, tokens_computed(batch.tokens, self.spec.model.text.packed))
            with meter.pausing():
                self._profiled(screen)
            self.watchdog.beat(self.steps_done)
            if before == started:
                self.checkpoints.reserve(self.learner.state.capture())
            if self._is_logged(before):
                row = self._row(meter.read(), before)
                self.sinks.log(row)
                self.alarms.look(self.steps_done, row)
                screen.progress(row, first, self.steps_total)
            if self.samples_seen >= self.total:
                return
            with meter.pausing():
                self._between_steps(screen, before)
            self.profiler.before(self.steps_done + 1)

    def _is_logged(self, before: int) -> bool:
        """Whether the step that begins at sample `before` is."""
        after = before + self.plan.at(before).batch_size
        return after >= self.total or after // self._log_period > before // self._log_period

    def _profiled(self, screen: Screen) -> None:
        """Tells where the time of the profiled steps went, after the last of them."""
        if found := self.profiler.after(self.steps_done):
            self.rundir.event("profile", **found)
            parts = "  ".join(f"{name.removesuffix('_ms')} {found[name]:.3g}" for name in found if name != "steps")
            screen.print(f"profile  ms: {parts}; {self.rundir.path / 'profile'}")

    def _between_steps(self, screen: Screen, before: int) -> None:
        """Evaluates and saves what is due after the step that began at sample `before`."""
        self._overdue += [name for name, cadence in self._cadences.items() if cadence.due(before, self.samples_seen)]
        self.lock.check()
        if signal := self.stop.agreed(self.comm):  # at once: what is overdue is done when the run goes on
            self._stop(signal)
        numbers: dict[str, float] = {}
        if self._overdue:
            numbers = self._evaluate()
            screen.evaluation(self.steps_done, numbers)
        due = self.checkpoints.due(before, self.samples_seen)
        if self.checkpoints.is_new_best(numbers) or due:
            with self.meter.phase("checkpoint"):
                self._save(numbers)

    def _stop(self, signal: str) -> None:
        """Saves and raises Stopped."""
        on = self.checkpoints.enabled
        if on:
            self._save({})
            self.checkpoints.wait()
        if self.comm.is_main:
            self.rundir.event("stopped", step=self.steps_done, signal=signal, saved=on)
        self.comm.barrier()
        try:
            self.stop.after_save(self.comm)
        finally:
            self.checkpoints.wait_for_uploads()
        saved = f"saved; go on with resume={self.rundir.path}" if on else "not saved, for checkpoint.every=none"
        raise Stopped(f"{signal}: stopped after step {self.steps_done:,} of {self.steps_total:,}, {saved}")

    def _batches(self) -> Iterator[Batch]:
        """From where the run is to its end; each stage has a loader of its own."""
        spec, comm = self.spec, self.comm
        for stage, samples in self.plan.left(self.samples_seen):
            loader = train_loader(
                self.dataset.train,
                self.order,
                ImageView(stage.image_size, spec.data.crop_scale, spec.data.max_pixels),
                self.tokenizer,
                seed=spec.seed,
                samples=samples,
                batch=stage.batch_size,
                rank=comm.rank,
                world=comm.world,
                workers=spec.data.workers,
                prefetch=spec.data.prefetch,
                pin=comm.device.type == "cuda",
                second=None if self.learner.teacher is None else self.learner.teacher.view,
                giver=self.stored or self.objective.giver,
            )
            yield from loader if spec.objective.reads_text else (batch.without_texts() for batch in loader)

    def _count(self, batch: Batch) -> None:
        if batch.bad:
            self.rundir.quarantine(batch.bad)
        self.bad_samples.count(len(batch.index), batch.bad)

    def _watchdog(self) -> Watchdog:
        return Watchdog(self.spec.distributed.watchdog_s, self.rundir.path, self.comm.rank, self.rundir.event)

    def _row(self, measured: dict[str, float], before: int) -> Row:
        """Of now; `before` are the samples seen before the step that the rate and its like are told of."""
        own = [self.bad_samples.bad.total(), measured.get("tokens_per_second", 0.0)]  # this rank's; of all it is a sum
        bad, tokens = self.comm.sum(torch.tensor(own, dtype=torch.float64, device=self.comm.device)).tolist()
        if "tokens_per_second" in measured:
            measured |= {"tokens_per_second": tokens, **self._utilised(measured["samples_per_second"], tokens, before)}
        return {
            "step": self.steps_done,
            "samples": self.samples_seen,
            "epoch": self.samples_seen / self.order.samples,
            "seconds": time.time(),
            **{f"train/{name}": value for name, value in measured.items()},
            "train/lr": self.learning_rate(before),
            **self.plan.row(before),
            **{
                f"train/samples/{name}": drawn.samples
                for name, drawn in self.order.source_counts(self.samples_seen).items()
            },
            "train/bad_samples": int(bad),
            **({"train/left_out_steps": self.non_finite.total} if self.non_finite.total else {}),
            **self.learner.loss_scale.metrics(),
            **self.checkpoints.metrics(),
        }

    def _utilised(self, samples: float, tokens: float, before: int) -> dict[str, float]:
        """Model FLOPs utilisation, at so many a second of all ranks. Nothing where the device's peak is not known."""
        if self.utilisation is None:
            return {}
        pixels = (self.plan.at(before).image_size / self.spec.model.image.size) ** 2
        seen = pixels * (1 - self.plan.patch_dropout(before))
        return {"mfu": self.utilisation.of(seen * samples, tokens, self.comm.world)}

    def _finish(self, screen: Screen) -> dict[str, float]:
        self._overdue = [name for name, cadence in self._cadences.items() if cadence.at_end]
        numbers = self._evaluate()
        bad = sum(self.comm.gather_objects(self.bad_samples.bad), Counter[str]())
        if self.checkpoints.at_end:
            self._save(numbers)
            self.checkpoints.wait()
        if self.comm.is_main:
            rows = read_rows(self.rundir.metrics)
            last = next((row for row in reversed(rows) if "train/loss" in row), {})
            numbers = {**{k: v for k, v in last.items() if k in ("step", "samples", "epoch", "train/loss")}, **numbers}
            config = self.rundir.config.read_text(encoding="utf-8")
            write_report(self.rundir.path, self.spec.name, rows, numbers, config)
            for reason, count in bad.most_common():
                self.rundir.event("bad_samples", reason=reason, count=count)
                screen.print(f"bad      {count:,} x {reason}")
            self.rundir.event("end", step=self.steps_done)
            screen.table(self.spec.name, numbers)
            screen.print(f"run directory {self.rundir.path}: report.html, report.png, metrics.jsonl, checkpoints/")
        return dict(self.comm.from_main(numbers))

    # -------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self) -> dict[str, float]:
        """Evaluates what is overdue, the average of the weights where there is one."""
        names, self._overdue = self._overdue, []
        if not names:
            return {}
        model = self.model if self.average is None else self.average.model
        embedder = Embedder.build(
            model,
            self.spec.model,
            self.spec.data,
            self.comm,
            self.precision,
            self.rundir.quarantine,
            lambda: self.watchdog.beat(self.steps_done),
        )
        start = time.perf_counter()
        numbers = self.suite.evaluate(names, embedder)
        if self.spec.objective.has_head and self.dataset.held_out is not None:
            images = embedder.images(self.dataset.held_out, _EMBEDDED)
            numbers |= {f"eval/head/{name}": x for name, x in self.objective.score(images.image, images.labels).items()}
        seconds = {"evaluation_s": time.perf_counter() - start}
        self.sinks.log({**self._row(seconds, self.samples_seen), **numbers})
        return numbers

    # ------------------------------------------------------------------------------------------- checkpoints

    def _save(self, numbers: dict[str, float]) -> None:
        """A checkpoint of this moment, and of what was just evaluated. Collective."""
        state = {
            "samples_seen": self.samples_seen,
            "epoch_samples": self.order.samples,
            "non_finite": [self.non_finite.total, self.non_finite.in_row],
            "loss_scale": self.learner.loss_scale.state(),
            "overdue": self._overdue,
            "world": self.comm.world,
            "data": self.dataset.train.fingerprint,
            "config": to_dict(self.spec),
            **({} if self.teacher is None else {"teacher": self.teacher.digest}),
        }
        self.checkpoints.save(self.steps_done, self.learner.state.capture(), state, numbers)

    def _resume(self, resume: Resume) -> bool:
        """Goes on from a checkpoint. Returns whether there was one."""
        found = self.checkpoints.find(resume)
        if found is None:
            return False
        spec, fingerprint = self.spec, self.dataset.train.fingerprint
        if found.state["data"] != fingerprint:
            raise CheckpointError(
                f"the data is not what {self.rundir.path} was trained on (fingerprint {fingerprint}, then "
                f"{found.state['data']}): restore it, or start a new run"
            )
        if self.teacher is not None and found.state.get("teacher") != self.teacher.digest:
            raise CheckpointError(
                f"{spec.teacher.given} is not the teacher that {self.rundir.path} learned from (weights "
                f"{self.teacher.digest}, then {found.state.get('teacher')}): give that one, or start a new run"
            )
        self.samples_seen = int(found.state["samples_seen"])
        self.plan.check_resumes(self.samples_seen, found.step)
        self.non_finite.total, self.non_finite.in_row = found.state["non_finite"]
        self.learner.loss_scale.restore(found.state.get("loss_scale", {}))
        self._overdue = [name for name in found.state["overdue"] if name in spec.evaluator]
        self.notes += self.learner.state.restore(found, spec.seed + 1 + self.samples_seen)
        return True
