"""The trainer: build, step, fit. Explicit calls, no callbacks; progress is counted in samples seen."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from clipx import checkpoint as ckpt
from clipx.checkpoint import Checkpoint, CheckpointDir
from clipx.config import to_dict
from clipx.console import Screen
from clipx.data import Dataset, nearest_multiples, open_on_all
from clipx.data.loader import Batch, View, deaths_told, train_loader
from clipx.data.order import SampleOrder
from clipx.data.source import Bad, alike
from clipx.distributed import Comm
from clipx.errors import CheckpointError, ClipxError, DataError, require
from clipx.evaluator.base import Embedder, check_evaluators, evaluate
from clipx.gradcache import NotFiniteError, forward_backward
from clipx.logger import Jsonl, Row, Sink, read_rows
from clipx.meter import Meter
from clipx.model.clip import CLIP, parameter_count
from clipx.model.tokenizer import Tokenizer
from clipx.objective.base import Metrics, Objective
from clipx.objective.table import SampleTable
from clipx.optimizer import parameter_groups, set_learning_rate
from clipx.precision import Precision
from clipx.report import write_report
from clipx.rng import rng_state, set_rng_state
from clipx.rundir import RunDir
from clipx.schedule import Cadence, Duration, LearningRate, Length
from clipx.spec import RunSpec

log = logging.getLogger(__name__)

_SHARE_AFTER = 1000  # samples seen before a share of bad ones means anything


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
    objective: Objective
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    rundir: RunDir
    checkpoints: CheckpointDir

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
        parts, micro = comm.world * spec.data.micro_batches, spec.data.micro_batches
        split = f"{comm.world} ranks" + (f" x {micro} micro-batches" if micro > 1 else "")
        fix = nearest_multiples(batch, parts)
        require(batch % parts == 0, f"data.batch_size={batch} is not divisible by {split}: use {fix}")
        self.dataset = open_on_all(spec.data, comm)
        train = self.dataset.train
        n = sum(train.sizes)
        _check_bad_share(len(train.bad), n + len(train.bad), spec.data.max_bad_share, train.bad[:1])
        require(
            batch <= n,
            f"data.batch_size={batch} is larger than the data set of {n:,} samples: use at most {n} or more data",
        )
        check_evaluators(spec.evaluator, self.dataset)
        self.order = spec.data.order(train, spec.seed)
        total = Duration.parse(spec.duration, "duration").samples(Length(n, batch))
        require(total >= batch, f"duration={spec.duration} is less than one step of {batch} samples: train longer")
        self.total = total // batch * batch
        self.length = length = Length(n, batch, self.total)
        spec.schedule.check_fits(spec.duration, length)
        self.learning_rate = spec.schedule.build(spec.optimizer.lr, length)
        self._cadences = {
            name: Cadence.parse(e.every, f"evaluator.{name}.every", length) for name, e in spec.evaluator.items()
        }
        self._save_cadence = Cadence.parse(spec.checkpoint.every, "checkpoint.every", length)
        self._log_period = max(batch, Duration.parse(spec.log_every, "log_every").samples(length))

    def _build_model(self) -> None:
        spec, comm = self.spec, self.comm
        self.precision = spec.precision.build(comm.device)
        self.tokenizer = Tokenizer(spec.model.text.context_length)
        self.view = View(spec.model.image.size, spec.data.crop_scale, spec.data.max_pixels)
        torch.manual_seed(spec.seed)  # the same weights on every rank
        self.model = spec.model.build(comm.device, self.precision.dtype)
        self.objective = spec.objective.build(comm, self.length).to(comm.device, self.precision.dtype)
        self.optimizer = spec.optimizer.build(parameter_groups(self.model, self.objective, spec.optimizer))
        self.parallel = self.model
        if comm.world > 1:
            devices = [comm.device] if comm.device.type == "cuda" else None
            self.parallel = DistributedDataParallel(self.model, device_ids=devices)
        torch.manual_seed(spec.seed + 1 + comm.rank)  # other dropout on every rank

    def _open_run(self) -> None:
        self.rundir = RunDir(Path(self.comm.from_main(self.spec.run_dir)))
        changed = self.comm.on_main(lambda: self.rundir.claim(self.spec))
        self.checkpoints = CheckpointDir(self.rundir.checkpoints, self._tell_damage)
        if self.comm.is_main:
            for source in filter(None, (self.dataset.train, self.dataset.held_out)):
                self.rundir.quarantine(source.bad)
        self._resumed = self._resume() if self.spec.resume != "none" else False
        self._changed = changed
        self._seen_here, self._bad_here = 0, Counter[str]()

    def _tell_damage(self, message: str) -> None:
        log.warning(message)
        self.rundir.event("checkpoint_damaged", message=message)

    # ---------------------------------------------------------------------------------------------- the step

    def step(self, batch: Batch) -> Metrics:
        """One optimizer step on this rank's share of a global batch, on the device. Returns 0-dim tensors, unread."""
        set_learning_rate(self.optimizer, self.learning_rate(self.samples_seen))
        self.objective.before_step(self.samples_seen)
        micro_batches = self.spec.data.micro_batches
        try:
            loss, metrics = forward_backward(
                self.parallel, self.objective, batch, micro_batches, self.comm, self.precision
            )
        except NotFiniteError as error:
            raise self._diverged(f"{error} at step {self.steps_done}") from error
        norm = self._clip()
        if not math.isfinite(norm.item()):  # every rank has the same
            raise self._diverged(f"the gradient is not finite at step {self.steps_done}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.samples_seen += self.spec.data.batch_size
        self.objective.after_step(self.samples_seen)
        return {"loss": loss, "grad_norm": norm, **metrics}

    def _clip(self) -> Tensor:
        """The global gradient norm, before clipping where that is on."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.spec.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.spec.optimizer.clip_norm, norm)
        return norm

    # --------------------------------------------------------------------------------------------- the run

    @property
    def steps_done(self) -> int:
        return self.samples_seen // self.spec.data.batch_size

    @property
    def steps_total(self) -> int:
        return self.total // self.spec.data.batch_size

    def fit(self) -> dict[str, float]:
        """Trains to the end of `spec.duration`, evaluates, reports. Returns the final numbers by name."""
        spec, comm = self.spec, self.comm
        self.sinks: list[Sink] = []
        if comm.is_main:
            self.sinks.append(Jsonl(self.rundir.metrics, self.steps_done))
            config = to_dict(spec)
            self.sinks += [x.build(self.rundir.path, spec.name, config, self.steps_done) for x in spec.logger.values()]
        screen = Screen(comm.is_main)
        self._announce(screen)
        if comm.is_main:
            self.rundir.event("start", step=self.steps_done, world=comm.world)
        try:
            with screen, deaths_told():
                self._loop(screen)
            final = self._finish(screen)
        finally:
            for sink in self.sinks:
                sink.close()
        comm.barrier()
        return final

    def _loop(self, screen: Screen) -> None:
        first = self.steps_done
        meter = Meter(self.comm)
        for batch in meter.waiting(self._batches()):
            before = self.samples_seen
            self._count(batch)
            metrics = self.step(batch.to(self.comm.device))
            meter.add(metrics, self.spec.data.batch_size)
            done = self.samples_seen >= self.total
            if done or self.samples_seen // self._log_period > before // self._log_period:
                row = self._row(meter.read(), self.learning_rate(before))
                self._log(row)
                screen.progress(row, first, self.steps_total)
            due = [name for name, cadence in self._cadences.items() if cadence.due(before, self.samples_seen)]
            if due and not done:
                start = time.perf_counter()
                screen.evaluation(self.steps_done, self._evaluate(due))
                meter.paused(start)
            if self._save_cadence.due(before, self.samples_seen) and not done:
                start = time.perf_counter()
                self.save()
                meter.paused(start)

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
        self._seen_here += len(batch.index)
        if batch.bad:
            self._bad_here.update(alike(item.reason) for item in batch.bad)
            self.rundir.quarantine(batch.bad)
        if self._seen_here >= min(_SHARE_AFTER, self.order.samples // self.comm.world):
            bad = self._bad_here.total()
            _check_bad_share(bad, self._seen_here + bad, self.spec.data.max_bad_share, batch.bad[:1])

    def _diverged(self, what: str) -> ClipxError:
        """The error of a step that is not finite; it is raised before the step is made."""
        self.rundir.event("non_finite", step=self.steps_done, rank=self.comm.rank, message=what)
        return ClipxError(
            f"{what}: lower optimizer.lr, lengthen schedule.warmup, or set optimizer.clip_norm=1; the step was not "
            "made, and the last checkpoint is from before"
        )

    def _row(self, measured: dict[str, float], lr: float) -> Row:
        bad = self.comm.sum(torch.tensor(self._bad_here.total(), device=self.comm.device))
        return {
            "step": self.steps_done,
            "samples": self.samples_seen,
            "epoch": self.samples_seen / self.order.samples,
            "seconds": time.time(),
            **{f"train/{name}": value for name, value in measured.items()},
            "train/lr": lr,
            **{f"train/samples/{name}": drawn.samples for name, drawn in self.order.drawn(self.samples_seen).items()},
            "train/bad_samples": int(bad.item()),
        }

    def _log(self, row: Row) -> None:
        for sink in self.sinks:
            sink.log(row)

    def _finish(self, screen: Screen) -> dict[str, float]:
        at_end = [name for name, cadence in self._cadences.items() if cadence.at_end]
        numbers = self._evaluate(at_end)
        bad = sum(self.comm.gather_objects(self._bad_here), Counter[str]())
        if self._save_cadence.at_end:
            self.save()
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

    def _evaluate(self, names: list[str]) -> dict[str, float]:
        if not names:
            return {}
        embedder = Embedder.build(
            self.model, self.spec.model, self.spec.data, self.comm, self.precision, self.rundir.quarantine
        )
        numbers = evaluate({name: self.spec.evaluator[name] for name in names}, embedder, self.dataset)
        self._log({**self._row({}, self.learning_rate(self.samples_seen)), **numbers})
        return numbers

    # ------------------------------------------------------------------------------------------- checkpoints

    def save(self) -> None:
        """Writes a checkpoint of this moment. Blocks until it is on disk, on all ranks."""
        rng = self.comm.gather_objects(rng_state(self.comm.device))
        tensors: ckpt.Tensors = {}
        state: dict[str, Any] = {}
        if self.comm.is_main:
            tensors = {
                **ckpt.prefixed("model", self.model.state_dict()),
                **ckpt.prefixed("objective", self.objective.state_dict()),
                **ckpt.prefixed("optimizer", ckpt.optimizer_tensors(self.optimizer)),
            }
            for rank, (states, _) in enumerate(rng):
                tensors |= ckpt.prefixed(f"rng/{rank}", states)
            state = {
                "samples_seen": self.samples_seen,
                "data": self.dataset.train.fingerprint,
                "rng": [plain for _, plain in rng],
                "config": to_dict(self.spec),
            }
        checkpoint = Checkpoint(self.steps_done, tensors, state)
        rows = {name: ckpt.Rows(table.rows, table.start) for name, table in self._tables().items()}
        self.checkpoints.save(checkpoint, self.spec.checkpoint.keep_last, self.comm, rows)

    def _tables(self) -> dict[str, SampleTable]:
        """The objective's per-sample state, by name."""
        return {name: module for name, module in self.objective.named_modules() if isinstance(module, SampleTable)}

    def _resume(self) -> bool:
        """Goes on from the newest good checkpoint. Returns whether there was one."""
        found = self.checkpoints.load_on_all(self.comm)
        if found is None:
            return False
        spec, fingerprint = self.spec, self.dataset.train.fingerprint
        if found.state["data"] != fingerprint:
            raise CheckpointError(
                f"the data is not what {self.rundir.path} was trained on (fingerprint {fingerprint}, then "
                f"{found.state['data']}): restore it, or start a new run"
            )
        ckpt.load_module(self.model, ckpt.part("model", found.tensors), "model")
        ckpt.load_module(self.objective, ckpt.part("objective", found.tensors), "objective")
        ckpt.load_optimizer(self.optimizer, ckpt.part("optimizer", found.tensors))
        if strange := found.tables() ^ self._tables().keys():
            raise CheckpointError(
                f"the checkpoint {found.folder} and objective={spec.objective.kind} do not both keep "
                f"{', '.join(sorted(strange))} for each sample: resume with the objective that wrote it"
            )
        for name, table in self._tables().items():
            found.read_rows(name, ckpt.Rows(table.rows, table.start))
        self.samples_seen = int(found.state["samples_seen"])
        self._resume_rng(found)
        return True

    def _resume_rng(self, found: Checkpoint) -> None:
        saved, comm = found.state["rng"], self.comm
        if len(saved) == comm.world:
            set_rng_state(ckpt.part(f"rng/{comm.rank}", found.tensors), saved[comm.rank], comm.device)
        else:
            log.warning("%d ranks wrote the checkpoint, %d go on: dropout draws anew", len(saved), comm.world)
            torch.manual_seed(self.spec.seed + 1 + comm.rank + self.samples_seen)

    # ---------------------------------------------------------------------------------------------- telling

    def _announce(self, screen: Screen) -> None:
        """The derived numbers, once."""
        spec, comm, n = self.spec, self.comm, self.order.samples
        batch, micro = spec.data.batch_size, spec.data.micro_batches
        parts = f"{batch // comm.world // micro:,} x {comm.world} ranks"
        if micro > 1:
            parts += f" x {micro} micro-batches"
        parameters = parameter_count(self.model) + parameter_count(self.objective)
        held = 0 if self.dataset.held_out is None else sum(self.dataset.held_out.sizes)
        lines = {
            "run": f"{spec.name} in {self.rundir.path}",
            "model": f"{spec.model.name}, {parameters:,} parameters, {parameter_count(self.model.image):,} of them in "
            f"the image tower; {spec.precision.kind} on {comm.world} x {comm.device.type}",
            "data": f"{spec.data.name}, {n:,} samples{self._published()}, {held:,} held out, "
            f"{len(self.dataset.train.bad):,} unusable",
            "batch": f"global batch {batch:,} = {parts}",
            "length": f"{self.total:,} samples = {self.total / n:.4g} epochs = {self.steps_total:,} steps",
        }
        sources = self.order.drawn(self.total).items()
        if sources:
            lines["sources"] = "; ".join(f"{name} {m:,} samples = {m / of:.4g} passes" for name, (m, of) in sources)
        if self._resumed:
            lines["resumed"] = f"at step {self.steps_done:,}, {self.samples_seen:,} samples"
        if self._changed:
            lines["changed"] = "; ".join(self._changed)
        for name, text in lines.items():
            screen.say(f"{name:8} {text}")

    def _published(self) -> str:
        return "" if self.dataset.published is None else f" of {self.dataset.published:,} published"


def _check_bad_share(bad: int, total: int, limit: float, examples: Sequence[Bad]) -> None:
    if bad > limit * total:
        example = f", e.g. {examples[0].key}: {examples[0].reason}" if examples else ""
        raise DataError(
            f"{bad:,} of {total:,} samples are bad, more than data.max_bad_share={limit}{example}; quarantine.jsonl in "
            "the run directory names them: mend the data, or raise the limit"
        )
