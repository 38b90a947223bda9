"""The trainer: build, step, fit. Explicit calls, no callbacks; progress is counted in samples seen."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from clipx.alarm import Alarms
from clipx.announce import facts
from clipx.average import WeightAverage
from clipx.checkpoint.run import Checkpointing
from clipx.config import to_dict
from clipx.console import Screen
from clipx.data import Dataset, open_on_all
from clipx.data.loader import Batch, View, deaths_told, train_loader
from clipx.data.order import SampleOrder
from clipx.data.tally import Tally, check_bad_share
from clipx.distributed import Comm
from clipx.errors import CheckpointError, NotSynced, Stopped, require
from clipx.evaluator.base import Embedder, check_evaluators, evaluate
from clipx.gradcache import NotFiniteError, forward_backward
from clipx.lock import RunLock
from clipx.logger import Jsonl, Row, Sinks, read_rows
from clipx.meter import Meter
from clipx.model.clip import CLIP
from clipx.model.tokenizer import Tokenizer
from clipx.nonfinite import NonFiniteSteps
from clipx.objective.base import Metrics, Objective
from clipx.optimizer import parameter_groups, set_learning_rate
from clipx.peers import peers_told
from clipx.precision import Precision
from clipx.report import write_report
from clipx.resume import Resume
from clipx.rng import seed_all
from clipx.rundir import RunDir, flatten
from clipx.schedule import Cadence, Duration, LearningRate, Length
from clipx.spec import RunSpec
from clipx.state import TrainState
from clipx.stop import Stop
from clipx.watchdog import Watchdog

log = logging.getLogger(__name__)


class Trainer:
    """One run. `Trainer(spec).fit()` trains, evaluates and leaves everything in `spec.run_dir`."""

    spec: RunSpec
    comm: Comm
    precision: Precision
    dataset: Dataset
    order: SampleOrder
    tokenizer: Tokenizer
    view: View
    model: CLIP
    parallel: nn.Module  # the model, or its data-parallel wrapper
    average: WeightAverage | None
    objective: Objective
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    state: TrainState  # the model, its average, the objective, the optimizer
    rundir: RunDir
    checkpoints: Checkpointing
    resumed: bool
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
        self.dataset = open_on_all(spec.data, comm)
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
        check_evaluators(spec.evaluator, self.dataset)
        self.order = spec.data.order(train, spec.seed)
        self.tally = Tally(spec.data.max_bad_share, self.order.samples // comm.world)
        total = Duration.parse(spec.duration, "duration").samples(Length(n, batch))
        require(total >= batch, f"duration={spec.duration} is less than one step of {batch} samples: train longer")
        self.total = total // batch * batch
        self.length = length = Length(n, batch, self.total)
        spec.schedule.check_fits(spec.duration, length)
        self.learning_rate = spec.schedule.build(spec.optimizer.lr, length)
        self._cadences = {
            name: Cadence.parse(e.every, f"evaluator.{name}.every", length) for name, e in spec.evaluator.items()
        }
        self._log_period = max(batch, Duration.parse(spec.log_every, "log_every").samples(length))

    def _build_model(self) -> None:
        spec, comm = self.spec, self.comm
        self.precision = spec.precision.build(comm.device)
        self.tokenizer = Tokenizer(spec.model.text.context_length)
        self.view = View(spec.model.image.size, spec.data.crop_scale, spec.data.max_pixels)
        seed_all(spec.seed)  # the same weights on every rank
        self.model = spec.model.build(comm.device, self.precision.dtype)
        decay = spec.optimizer.ema_decay
        self.average = None if decay is None else WeightAverage(self.model, decay)
        self.objective = spec.objective.build(comm, self.length).to(comm.device, self.precision.dtype)
        self.optimizer = spec.optimizer.build(parameter_groups(self.model, self.objective, spec.optimizer))
        self.state = TrainState(self.model, self.average, self.objective, self.optimizer, comm)
        self.parallel = self.model
        if comm.world > 1:
            self.parallel = DistributedDataParallel(self.model)  # without device_ids, by which it would move the tokens
        seed_all(spec.seed + 1 + comm.rank)  # other dropout on every rank

    def _open_run(self) -> None:
        """Takes the run directory, and goes on from what is in it."""
        spec, comm = self.spec, self.comm
        self.rundir = RunDir(Path(comm.from_main(spec.run_dir)))
        resume = Resume.parse(spec.resume)
        if resume.run_dir is not None and spec.checkpoint.remote is None:
            comm.on_main(self.rundir.must_exist)
        self.alarms = Alarms(self.objective, self._warn)
        self.non_finite = NonFiniteSteps(spec.optimizer, self.model, self._warn)
        self._open = contextlib.ExitStack()  # what `close` closes
        self.sinks = Sinks([], self.rundir.event)
        self._overdue: list[str] = []  # evaluators that the run stopped before
        try:
            self.lock = self._open.enter_context(RunLock(self.rundir.path, comm, self.rundir.event))
            self.checkpoints = Checkpointing(self.rundir.path, spec.checkpoint, self.length, comm, self.rundir.event)
            self._open.callback(self.checkpoints.close)
            self.checkpoints.fetch(resume)
            self.notes = comm.on_main(lambda: self.rundir.claim(spec))
            self.resumed = self._resume(resume)
            comm.on_main(lambda: self.rundir.keep(spec))
            self.checkpoints.open()
            if comm.is_main:
                for source in filter(None, (self.dataset.train, self.dataset.held_out)):
                    self.rundir.quarantine(source.bad)
        except BaseException:
            self._open.close()
            raise

    def _warn(self, kind: str, message: str, **facts: Any) -> None:
        """An event that a person should hear of; every rank knows of it."""
        if self.comm.is_main:
            log.warning(message)
            self.rundir.event(kind, message=message, **facts)

    # ---------------------------------------------------------------------------------------------- the step

    def step(self, batch: Batch) -> Metrics:
        """One optimizer step on this rank's share of a global batch, on the device. Returns 0-dim tensors, unread.

        None of them where the loss or the gradient was not finite and `optimizer.non_finite` lets the run go on.
        """
        set_learning_rate(self.optimizer, self.learning_rate(self.samples_seen))
        self.objective.before_step(self.samples_seen)
        self.non_finite.before()
        metrics: Metrics = {}
        try:
            metrics = self._gradients(batch)
            self.optimizer.step()
            self.non_finite.made()
        except NotFiniteError as error:
            self.non_finite.leave_out(self.steps_done, str(error), self._roll_back)
        self.optimizer.zero_grad(set_to_none=True)
        self.samples_seen += self.spec.data.batch_size
        if metrics:
            self.objective.after_step(self.samples_seen)
            if self.average is not None:
                self.average.update(self.model)
        return metrics

    def _gradients(self, batch: Batch) -> Metrics:
        """Raises NotFiniteError, on all ranks."""
        micro = self.spec.data.micro_batches
        loss, metrics = forward_backward(self.parallel, self.objective, batch, micro, self.comm, self.precision)
        norm = self._clip()
        if not math.isfinite(norm.item()):  # every rank has the same
            raise NotFiniteError("the gradient is not finite")
        return {"loss": loss, "grad_norm": norm, **metrics}

    def _clip(self) -> Tensor:
        """The global gradient norm, before clipping where that is on."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.spec.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.spec.optimizer.clip_norm, norm)
        return norm

    def _roll_back(self) -> int | None:
        """To the weights of the newest checkpoint; the data goes on. Its step, or None where there is none."""
        found = self.checkpoints.load()
        if found is None:
            return None
        self.state.restore(found, self.spec.seed + 1 + self.samples_seen)
        return found.step

    # --------------------------------------------------------------------------------------------- the run

    @property
    def steps_done(self) -> int:
        return self.samples_seen // self.spec.data.batch_size

    @property
    def steps_total(self) -> int:
        return self.total // self.spec.data.batch_size

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
            screen.say(f"{name:8} {text}")
        if comm.is_main:
            self.rundir.event("start", step=self.steps_done, world=comm.world)
        try:
            with (
                screen,
                peers_told(comm, lambda: self.steps_done),
                deaths_told(),
                Stop(tell=comm.is_main) as self.stop,
                self._watchdog() as self.watchdog,
            ):
                self._loop(screen)
                final = self._finish(screen)
                comm.barrier()
                if not self.checkpoints.synced():
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
        meter = Meter(self.comm)
        for batch in meter.waiting(self._batches()):
            before = self.samples_seen
            self._count(batch)
            metrics = self.step(batch.to(self.comm.device))
            meter.add(metrics, self.spec.data.batch_size)
            self.watchdog.beat(self.steps_done)
            if before == started:
                self.checkpoints.reserve(self.state.capture())
            done = self.samples_seen >= self.total
            if done or self.samples_seen // self._log_period > before // self._log_period:
                row = self._row(meter.read(), self.learning_rate(before))
                self.sinks.log(row)
                self.alarms.look(self.steps_done, row)
                screen.progress(row, first, self.steps_total)
            if done:
                return
            with meter.pausing():
                self._between_steps(screen, before)

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
        if self.checkpoints.better(numbers) or due:
            self._save(numbers)

    def _stop(self, signal: str) -> None:
        """Saves and raises Stopped."""
        on = self.checkpoints.on
        if on:
            self._save({})
            self.checkpoints.wait()
        if self.comm.is_main:
            self.rundir.event("stopped", step=self.steps_done, signal=signal, saved=on)
        self.comm.barrier()
        try:
            self.stop.after_save(self.comm)
        finally:
            self.checkpoints.synced()
        saved = f"saved; go on with resume={self.rundir.path}" if on else "not saved, for checkpoint.every=none"
        raise Stopped(f"{signal}: stopped after step {self.steps_done:,} of {self.steps_total:,}, {saved}")

    def _batches(self) -> DataLoader[Batch]:
        spec, comm = self.spec, self.comm
        return train_loader(
            self.dataset.train,
            self.order,
            self.view,
            self.tokenizer,
            seed=spec.seed,
            samples=range(self.samples_seen, self.total),
            batch=spec.data.batch_size,
            rank=comm.rank,
            world=comm.world,
            workers=spec.data.workers,
            prefetch=spec.data.prefetch,
            pin=comm.device.type == "cuda",
        )

    def _count(self, batch: Batch) -> None:
        if batch.bad:
            self.rundir.quarantine(batch.bad)
        self.tally.count(len(batch.index), batch.bad)

    def _watchdog(self) -> Watchdog:
        return Watchdog(self.spec.distributed.watchdog_s, self.rundir.path, self.comm.rank, self.rundir.event)

    def _row(self, measured: dict[str, float], lr: float) -> Row:
        bad = self.comm.sum(torch.tensor(self.tally.bad.total(), device=self.comm.device))
        return {
            "step": self.steps_done,
            "samples": self.samples_seen,
            "epoch": self.samples_seen / self.order.samples,
            "seconds": time.time(),
            **{f"train/{name}": value for name, value in measured.items()},
            "train/lr": lr,
            **{f"train/samples/{name}": drawn.samples for name, drawn in self.order.drawn(self.samples_seen).items()},
            "train/bad_samples": int(bad.item()),
            **({"train/left_out_steps": self.non_finite.total} if self.non_finite.total else {}),
            **self.checkpoints.metrics(),
        }

    def _finish(self, screen: Screen) -> dict[str, float]:
        self._overdue = [name for name, cadence in self._cadences.items() if cadence.at_end]
        numbers = self._evaluate()
        bad = sum(self.comm.gather_objects(self.tally.bad), Counter[str]())
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
                screen.say(f"bad      {count:,} x {reason}")
            self.rundir.event("end", step=self.steps_done)
            screen.table(self.spec.name, numbers)
            screen.say(f"run directory {self.rundir.path}: report.html, report.png, metrics.jsonl, checkpoints/")
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
        numbers = evaluate({name: self.spec.evaluator[name] for name in names}, embedder, self.dataset)
        self.sinks.log({**self._row({}, self.learning_rate(self.samples_seen)), **numbers})
        return numbers

    # ------------------------------------------------------------------------------------------- checkpoints

    def _save(self, numbers: dict[str, float]) -> None:
        """A checkpoint of this moment, and of what was just evaluated. Collective."""
        state = {
            "samples_seen": self.samples_seen,
            "non_finite": [self.non_finite.total, self.non_finite.in_row],
            "overdue": self._overdue,
            "world": self.comm.world,
            "data": self.dataset.train.fingerprint,
            "config": to_dict(self.spec),
        }
        self.checkpoints.save(self.steps_done, self.state.capture(), state, numbers)

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
        self.samples_seen = int(found.state["samples_seen"])
        self.non_finite.total, self.non_finite.in_row = found.state["non_finite"]
        self._overdue = [name for name in found.state["overdue"] if name in spec.evaluator]
        self.notes += self.state.restore(found, spec.seed + 1 + self.samples_seen)
        return True
