"""The trainer of a run: its parts, the training loop, and the step. Progress is counted in samples seen.

`Trainer(spec).fit()` trains, evaluates, and writes everything to `spec.run_dir`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from clipx.config.saved import to_dict
from clipx.errors import ClipxError, ConfigError, ResultError, Stopped
from clipx.trainer.backends import prepare_backends
from clipx.trainer.data_side import DataSide
from clipx.trainer.evaluation import PeriodicEvaluation
from clipx.trainer.learner import Learner
from clipx.trainer.memory import report_out_of_memory
from clipx.trainer.metrics import Meter, Monitors
from clipx.trainer.nonfinite import ADVICE
from clipx.trainer.run import Run
from clipx.trainer.start import check_on_ranks, plan_run, resolve
from clipx.trainer.summary import facts

if TYPE_CHECKING:
    from clipx.data.batch import Batch
    from clipx.data.loader import DevicePrefetcher
    from clipx.logger import Row
    from clipx.objective.base import Metrics
    from clipx.trainer.spec import RunSpec
    from clipx.trainer.stages import Step


class Trainer:
    """Trainer of one run: what it reads (`data`), learns (`learner`) and writes (`run`), and the loop over them.

    Args:
        spec: the complete configuration, as `clipx.compose` returns it.

    Attributes:
        spec: the complete configuration, as config.yaml has it.
        comm: ranks and device.
        run: directory, lock, checkpoints, loggers, signals, watchdog.
        data: sources, order of samples, loader processes.
        stages: settings of each step.
        learner: model, objective, optimizer.
        evaluation: evaluators, and whether the run ends early.
        meter: metrics since the last log.
        monitors: alarms.
        samples_seen: position in the run.

    Shape:
        - Input of `step`: a `Batch` of b samples on the device, this rank's share of the global batch.
        - Output: metrics by name, 0-dim tensors on the device.

    Raises:
        ConfigError: an option does not fit the device, the ranks or the data.
        DataError: the data cannot be read, or too many of its samples are bad.
        CheckpointError: `spec.resume` names no checkpoint that can be used.
        Locked: another process uses the run directory.
        Stopped: a signal ended `fit`, which saved a checkpoint unless `checkpoint.every=none`.
        NotSynced: the upload of `fit` to `checkpoint.remote` is not complete.
        ResultError: the final loss of `fit` is above `spec.max_final_loss`.

    Example:
        A run of two steps on the CPU, without evaluation:

            >>> from clipx import Trainer, compose
            >>> options = ["model=tiny", "data=digits", "data.workers=0", "duration=2st", "schedule.warmup=1st"]
            >>> spec = compose(*options, "data.batch_size=32", "evaluate=false", "report=false", "run_dir=first")
            >>> final = Trainer(spec).fit()
            run      tiny-digits-...
            >>> final["step"], final["samples"]
            (2, 64)
    """

    def __init__(self, spec: RunSpec) -> None:
        """Builds all parts, and resumes as `spec.resume` specifies. Raises ClipxError before any training."""
        prepare_backends(spec.deterministic)
        self.comm = comm = spec.distributed.build()
        with contextlib.ExitStack() as on_error, comm.naming_lost_peers(), report_out_of_memory(spec, comm):
            on_error.callback(comm.leave)
            check_on_ranks(spec, comm)
            typed, spec = spec, resolve(spec, comm)
            self.spec = spec
            self.run = Run(spec, comm)
            on_error.callback(self.run.close)
            self.data = DataSide(spec, comm)
            self.stages = plan_run(spec, self.data.samples)
            self.evaluation = PeriodicEvaluation(spec, self.data, self.stages.length)
            length, varying = self.stages.length, self.stages.varying
            self.learner = Learner(spec, comm, length, varying, self.data.opened.classes, self.data.stored)
            self.meter = Meter(comm, self.learner.utilisation())
            self.monitors = Monitors(self.learner.objective, self.run.warn, spec.data)
            self.samples_seen = 0
            self._open_run(typed)
            on_error.pop_all()

    def _open_run(self, typed: RunSpec) -> None:
        """Locks the run directory, and resumes or starts the run in it. `typed`: the spec before `resolve`."""
        run = self.run
        changed = run.open(self.stages.length)
        restored = self._resume()
        weights: list[str] = []
        if restored is None:
            self.samples_seen, weights = self.learner.begin(self.stages, self.data.order.samples)
        run.step = self.steps_done
        lines = {
            "remote": run.checkpoints.url,
            "resumed": None if restored is None else f"at step {run.step:,}, {self.samples_seen:,} samples",
            "teacher": self.learner.taught_by and self.learner.taught_by.description,
            "weights": "; ".join(weights),
            "changed": "; ".join([*changed, *(restored or [])]),
        }
        described = facts(self.spec, typed, self.data, self.stages, self.learner)
        run.facts = described | {name: text for name, text in lines.items() if text}
        run.begin([source.bad for source in (*self.data.sources, *self.evaluation.suite.sources)])

    def close(self) -> None:
        """Closes all files and unlocks the run directory. `fit` calls it; call it for a trainer that is not fitted."""
        self.run.close()

    @property
    def steps_done(self) -> int:
        """Number of finished optimizer steps."""
        return self.stages.steps(self.samples_seen)

    # ------------------------------------------------------------------------------------------------------- loop

    def fit(self) -> dict[str, float]:
        """Trains to the end of `spec.duration`, evaluates and writes the report. Returns the final metrics by name.

        Raises Stopped if a signal stopped the run before, NotSynced if the upload to `checkpoint.remote` is not
        complete.
        """
        with (
            self.run.training(),
            report_out_of_memory(self.spec, self.comm),
            self.data.loading(self.learner, self.stages, self.samples_seen, self.evaluation.suite.sources),
        ):
            self.run.start()
            final = self._finish(self._loop())
            self.comm.barrier()
            self.comm.leave()  # the run is complete: from here on no rank needs another
            self.run.finish_uploads()
            self.run.beat(self.steps_done)
        return final

    def _loop(self) -> dict[str, float]:
        """Trains to the end. Returns the metrics of the evaluation after the last step, if it has run already."""
        first, started, run, stopping = self.steps_done, self.samples_seen, self.run, self.evaluation.early_stopping
        if numbers := self._evaluate():  # what was overdue when the run stopped
            run.screen.evaluation(first, numbers)
        if stopping.ends_after(numbers, logged=True):
            return numbers
        run.profiler.before(first + 1)
        for step in self.steps():
            with self.meter.pausing():
                run.beat(self.steps_done)
                run.show_profile()
            if step.start == started:
                run.checkpoints.reserve(self.learner.state.capture())
            if logged := self._is_logged(step):
                self._settle()
                row = self._row(self.meter.read(step), step)
                run.log(row)
                self.monitors.check(self.steps_done, row)
                run.screen.progress(row, first, self.stages.steps_total)
            if self.samples_seen >= self.stages.total:
                break
            with self.meter.pausing():
                numbers = self._between_steps(step, logged)
            if stopping.ending:
                return numbers
            run.profiler.before(self.steps_done + 1)
        return {}

    def steps(self) -> Iterator[Step]:
        """Makes the steps to the end of the run, and adds each to `meter`. Yields each."""
        batches = self.batches()
        for batch in self.meter.waiting(batches):
            step = self.stages.at(self.samples_seen)
            self.data.count(batch, self.run.dir.quarantine)
            with self.meter.phase("step"):
                metrics = self.step(batch)
            with self.meter.phase("data_wait"):
                batches.start_next()
            found_inf = self.learner.non_finite.found_inf
            self.meter.add(metrics, step.batch_size, batch.text.tokens, found_inf, batch.image.tokens)
            yield step

    def batches(self) -> DevicePrefetcher:
        """Returns this rank's batches from the current position to the end of the run, on the device."""
        return self.data.batches(self.learner, self.stages, self.samples_seen)

    def step(self, batch: Batch) -> Metrics:
        """Makes one optimizer step on this rank's share of a global batch, on the device, with the settings at
        `samples_seen`. Collective.

        Returns 0-dim tensors that the host has not read: loss, norm of the gradient, metrics of the objective; for a
        logged step also the norms of each tower's gradient and update. Raises ClipxError if the run must stop because
        of the step before.
        """
        step = self.stages.at(self.samples_seen)
        detailed = self._is_logged(step)
        metrics = self.learner.backward(batch, step, detailed)
        if self._settle():  # the step before was rolled back: again, with the restored weights
            metrics = self.learner.backward(batch, step, detailed)
        self.run.checkpoints.hold_updates()  # until a save in progress has copied the weights
        metrics |= self.learner.update(step, detailed)
        self.samples_seen = step.end
        return metrics

    def _is_logged(self, step: Step) -> bool:
        return step.end >= self.stages.total or self.stages.logs.due(step.start, step.end)

    def _between_steps(self, step: Step, logged: bool) -> dict[str, float]:
        """Runs the evaluations and saves the checkpoints due after a step. Returns the metrics of the evaluation."""
        run, evaluation = self.run, self.evaluation
        evaluation.add_due(step.start, step.end)
        run.lock.check()
        if signal := run.signals.received_by_any(self.comm):  # at once: overdue evaluations run when the run resumes
            self._stop(signal)
        if numbers := self._evaluate():
            run.screen.evaluation(self.steps_done, numbers)
        if evaluation.early_stopping.ends_after(numbers, logged):
            return numbers
        due = run.checkpoints.due(step.start, step.end)
        if run.checkpoints.is_new_best(numbers) or due:
            with self.meter.phase("checkpoint"):
                self._save(numbers)
        return numbers

    # ------------------------------------------------------------------------------------- steps that are not finite

    def _settle(self) -> bool:
        """Applies optimizer.non_finite to the last step. Returns whether the run was rolled back. Collective.

        Restores the newest checkpoint then, but not the position in the data. Raises ClipxError if the run must stop.
        """
        skipped = self.learner.settle()
        if skipped is None:
            return False
        if not skipped.rolls_back(self.spec.optimizer, self.run.warn):
            return False
        found = self.run.checkpoints.load()
        if found is None:
            raise ClipxError(f"{skipped.message}, and there is no checkpoint to roll back to: {ADVICE}")
        self.learner.roll_back(found, self.spec.seed + 1 + self.samples_seen)
        restored_to = f"restored the weights of step {found.step}; the data continues after this batch"
        self.run.warn("rolled_back", f"{skipped.message}: {restored_to}", step=skipped.step)
        return True

    # ---------------------------------------------------------------------------------------- after and between steps

    def _evaluate(self) -> dict[str, float]:
        """Runs the evaluators that are overdue, and logs their metrics. Returns the metrics by name. Collective."""
        if not self.evaluation.overdue:
            return {}
        start, run, step = time.perf_counter(), self.run, self.steps_done
        self._settle()
        progress = run.screen.loops.named("evaluation")
        numbers = self.evaluation.run(self.learner, run.dir.quarantine, lambda: run.beat(step), progress)
        seconds = {"evaluation_s": time.perf_counter() - start}
        run.log({**self._row(seconds, self.stages.at(self.samples_seen)), **numbers})
        return numbers

    def _row(self, measured: dict[str, float], step: Step) -> Row:
        """Returns the current metrics for the loggers. Collective. `step`: the last one that was measured."""
        return {
            "step": self.steps_done,
            "samples": self.samples_seen,
            "epoch": self.samples_seen / self.data.order.samples,
            "seconds": time.time(),
            **{f"train/{name}": value for name, value in measured.items()},
            **self.stages.metrics(step),
            **self.data.metrics(self.samples_seen),
            **self.learner.metrics(),
            **self.run.checkpoints.metrics(),
        }

    def _save(self, numbers: dict[str, float]) -> None:
        """Saves a checkpoint of the current state. `numbers`: metrics of the evaluation just run. Collective."""
        self.run.check()
        self._settle()
        tensors = self.learner.state.capture()
        until_update = self.learner.state.changed_by_updates(tensors)
        self.run.checkpoints.save(self.steps_done, tensors, self._state(), numbers, until_update)

    def _stop(self, signal: str) -> None:
        """Saves a checkpoint and raises Stopped."""
        run, on = self.run, self.run.checkpoints.enabled
        if on:
            self._save({})
            run.checkpoints.wait()
        if self.comm.is_main:
            run.dir.event("stopped", step=self.steps_done, signal=signal, saved=on)
        self.comm.barrier()
        try:
            run.signals.call_previous_handler(self.comm)
        finally:
            run.checkpoints.wait_for_uploads()
        saved = f"saved; continue with resume={run.dir.path}" if on else "not saved, since checkpoint.every=none"
        raise Stopped(f"{signal}: stopped after step {self.steps_done:,} of {self.stages.steps_total:,}, {saved}")

    def _finish(self, numbers: dict[str, float]) -> dict[str, float]:
        """Evaluates, saves and reports the finished run. `numbers`: of the evaluation after the last step."""
        run, stopping = self.run, self.evaluation.early_stopping
        run.signals.finish()
        stopping.announce(run.screen.print, run.dir.event, self.steps_done)
        self.evaluation.add_at_end(numbers)
        numbers = numbers | self._evaluate()
        bad = self.data.bad_samples()
        if run.checkpoints.at_end:
            self._save(numbers)
            run.checkpoints.wait()
        if self.comm.is_main:
            numbers = run.finish(numbers, bad, stopping.facts)
        run.check()
        return self._check_loss(self.comm.broadcast_object(numbers))

    def _check_loss(self, numbers: dict[str, float]) -> dict[str, float]:
        """Returns the final metrics. Raises ResultError on all ranks if the loss is above `max_final_loss`."""
        limit, found = self.spec.max_final_loss, numbers.get("train/loss", math.nan)
        if limit is None or found <= limit:
            return numbers
        message = (
            f"train/loss={found:.4g} after {self.steps_done:,} steps is above max_final_loss={limit:g}: train longer "
            "(duration), change optimizer.lr, or look for equal captions in the batch; else the model or the loss is "
            "wrong"
        )
        self.run.warn("loss_above_limit", message, logged=False, loss=found)
        raise ResultError(message)

    # ------------------------------------------------------------------------------------------------------ resuming

    def _state(self) -> dict[str, Any]:
        """Returns what a checkpoint has in addition to the tensors, for its file state.json."""
        return {
            "samples_seen": self.samples_seen,
            "overdue": self.evaluation.overdue,
            "early_stopping": self.evaluation.early_stopping.state(),
            "interval": self.meter.state(),
            "world": self.comm.world,
            "config": to_dict(self.spec),
            **self.data.state(),
            **self.learner.counters(),
        }

    def _resume(self) -> list[str] | None:
        """Restores the state from a checkpoint. Returns lines about what changed; None: the run is new.

        Raises CheckpointError.
        """
        found = self.run.find_checkpoint()
        if found is None:
            return None
        state, total = found.state, self.stages.steps_total
        self.data.restore(state)
        if found.step > total:
            raise ConfigError(
                f"duration={self.spec.duration} ends at step {total:,}, and {found.folder} is of step {found.step:,}: "
                f"give duration={found.step}st or more, or an earlier checkpoint by resume=step:N"
            )
        self.samples_seen = int(state["samples_seen"])
        self.stages.check_resumes(self.samples_seen, found.step)
        self.evaluation.overdue = [name for name in state["overdue"] if name in self.spec.active_evaluators]
        self.evaluation.early_stopping.restore(state.get("early_stopping", {}))
        self.meter.restore(state.get("interval", {}))
        return self.learner.restore(found, self.spec.seed + 1 + self.samples_seen)
