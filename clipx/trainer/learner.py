"""The model, objective and optimizer of a run, built from their specs, and their optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipx.checkpoint.format import Checkpoint
from clipx.config.duration import Length
from clipx.data.batch import Batch
from clipx.data.spec import Classes
from clipx.distributed.comm import Comm
from clipx.model.blocks import named_blocks
from clipx.model.clip import CLIP
from clipx.model.freeze import freeze
from clipx.model.lora import add_adapters
from clipx.model.spec import Varying
from clipx.objective.base import Metrics, Objective
from clipx.optimizer.groups import parameter_groups
from clipx.optimizer.master import MasterWeights
from clipx.optimizer.skippable import SkippableStep
from clipx.optimizer.spec import NonFinite
from clipx.precision.loss_scaler import LossScale
from clipx.precision.spec import Precision, PrecisionSpec
from clipx.teacher.live import Teacher
from clipx.trainer.compile import CompileSpec
from clipx.trainer.ema import WeightAverage
from clipx.trainer.gradcache import forward_backward
from clipx.trainer.metrics import clone_weights, gradient_norms, update_norms
from clipx.trainer.nonfinite import NonFiniteSteps, Outcome
from clipx.trainer.rng import TorchRng, seed_all
from clipx.trainer.spec import RunSpec
from clipx.trainer.state import TrainState
from clipx.weights.load import load_into, load_weights
from clipx.weights.tower import load_towers

_TEXTS = 256  # texts embedded at a time


@dataclass(frozen=True, slots=True)
class StepPosition:
    """Position of a step in the run: steps done before it, and samples seen before and after it."""

    step: int
    before: int
    after: int


class Learner:
    """Model, objective and optimizer, and their step. The caller sets what depends on samples seen, e.g. the learning
    rate."""

    spec: RunSpec
    comm: Comm
    format: PrecisionSpec  # the number format that `spec.precision` chooses on the device
    precision: Precision
    model: CLIP  # computes forward and backward
    weights: CLIP  # updated by the optimizer: the model itself, or its float32 master
    masters: MasterWeights | None
    parallel: nn.Module  # the model, or its data-parallel wrapper
    average: WeightAverage | None
    objective: Objective
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    non_finite: NonFiniteSteps
    teacher: Teacher | None  # a live teacher, which embeds each batch
    converted: list[str]  # names of the layers in another number format
    compile: CompileSpec  # what `spec.compile` chooses on the device
    compile_choice: str  # line for the log
    state: TrainState  # state of all of the above, for checkpoints

    def __init__(
        self,
        spec: RunSpec,
        comm: Comm,
        length: Length,
        varying: Varying,
        classes: Classes | None = None,
        report: Callable[..., None] = lambda kind, **facts: None,
        roll_back: Callable[[], int | None] = lambda: None,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        """Builds the same weights on every rank, then seeds each rank differently. Raises ConfigError.

        `report` and `roll_back`: see `NonFiniteSteps`. `before_update` is called between backward and the update.
        """
        self._before_update = before_update
        self.spec, self.comm = spec, comm
        self.format = spec.precision.on(comm.device)
        spec.check_format(self.format)
        self.precision = self.format.build(comm.device)
        logits = spec.objective.teacher_logits
        self.teacher = spec.teacher.build(comm, self.precision, spec.data.micro_batches, logits)
        seed_all(spec.seed)
        self.weights = self.model = spec.model.build(comm.device, self.precision.stored, varying)
        freeze(self.weights, spec.model)
        add_adapters(self.weights, spec.model)
        self.masters = None
        if self.precision.master_weights:
            self.masters = MasterWeights(self.weights, self.precision.dtype)
            self.model = self.masters.model
        self.loss_scale = LossScale(self.precision.loss_scale, comm.device.type)
        self.converted = self.format.convert(named_blocks(self.model))
        blocks = named_blocks(self.model)
        self.compile, self.compile_choice = spec.compile.on_device(comm.device, blocks)
        self.compile.configure(spec.deterministic)
        self.compile.compile_towers(blocks)
        decay = spec.optimizer.ema_decay
        self.average = None if decay is None else WeightAverage(self.weights, decay)
        for model in (self.model, *([self.average.model] if self.average else [])):
            spec.distributed.prepare(model, comm, self.precision.autocast_dtype)
        self.objective = spec.objective.build(comm, length)
        self.objective.prepare(classes, self.weights.embed_dim)
        self.objective.to(comm.device, self.precision.wide)
        self.compile.compile_objective(self.objective)
        self.optimizer = spec.optimizer.build(parameter_groups(self.weights, self.objective, spec.optimizer))
        self.compile.compile_optimizer(self.optimizer)
        self.state = TrainState(self.weights, self.average, self.objective, self.optimizer, comm, self.masters)
        masters = None if self.masters is None else self.masters.by_parameter
        self.parallel = spec.distributed.wrap(self.model, comm, masters)
        if self.masters is not None:
            self.masters.averaged = self.parallel is not self.model
        self.non_finite = NonFiniteSteps(spec.optimizer, self.model, comm, self.loss_scale.on, report, roll_back)
        self._step = SkippableStep(self.optimizer, comm.device, spec.optimizer.non_finite is NonFinite.skip)
        seed_all(spec.seed + 1 + comm.rank)

    def restore(self, found: Checkpoint, seed: int) -> list[str]:
        """Restores the state from a checkpoint. `seed`: see `TrainState.restore`. Returns lines for the log."""
        before, now = found.state.get("precision", ""), self.format.kind
        asked = found.state.get("config", {}).get("precision", {}).get("kind")  # another one is reported as a change
        differs = before and before != now and asked == self.spec.precision.kind
        notes = [f"precision={asked} chooses {now} on this device, {before} before"] if differs else []
        return notes + self.state.restore(found, seed)

    def load_initial_weights(self) -> list[str]:
        """Loads the weights that `model.weights`, or those of single towers, name. Returns lines for the log.

        The moving average starts with the weights after the first step.
        """
        location, lines = self.spec.model.weights, list[str]()
        if location is not None:
            found = load_weights(location)
            lines += [location, *load_into(self.weights, found, initial=True)]
            lines += self.objective.adopt_scale(found.log_scale, found.bias)
        lines += load_towers(self.weights, self.spec.model)
        if lines and self.masters is not None:
            self.masters.copy_weights_to_model()
        self.objective.initialize(self._embed_texts)
        return lines

    @torch.no_grad()
    def _embed_texts(self, texts: Sequence[str]) -> Tensor:
        tokens = self.spec.model.text.build_tokenizer()(texts)
        self.model.eval()
        with self.precision.autocast():
            rows = [self.model.encode_text(part.to(self.comm.device)) for part in tokens.split(_TEXTS)]
        self.model.train()
        return torch.cat(rows)

    def step(self, batch: Batch, position: StepPosition, detailed: bool = False) -> Metrics:
        """Makes one optimizer step on this rank's share of a global batch, on the device. Collective.

        Returns 0-dim tensors that the host has not read. A step whose loss or gradient is not finite changes nothing;
        `non_finite.found_inf` is then 1, and `settle` applies `optimizer.non_finite`. `detailed`: also returns the
        norms of each tower's gradient and update, which needs a copy of the weights. Raises ClipxError if the run must
        stop because of the step before.
        """
        batch = batch if self.teacher is None else self.teacher(batch)
        rng, micro_batches = TorchRng.get(self.comm.device), self.spec.data.micro_batches
        while True:
            self.objective.before_step(position.before)
            self.non_finite.before_forward()
            loss, found = forward_backward(
                self.parallel,
                self.objective,
                batch,
                micro_batches,
                self.comm,
                self.precision,
                self.loss_scale,
                self.non_finite,
            )
            self._unscale()
            norms = gradient_norms(self.weights, self.comm) if detailed else {}
            norm = self._clip()
            found_inf = self.non_finite.decide(loss, norm)
            if self.loss_scale.retries(loss, norm):  # the scale was too large: again, from the same state
                rng.set(self.comm.device)
                self.non_finite.restore_buffers()
            elif self.settle():  # has rolled back the previous step: again, with the restored weights
                self.loss_scale.discard()
            else:
                break
            self._zero_grad()
        previous = clone_weights(self.weights) if detailed else {}
        self._before_update()
        self.loss_scale.step(self._step, self.optimizer, found_inf)
        self.non_finite.restore_buffers()
        self.non_finite.record(position.step)
        metrics = {"loss": loss, "grad_norm": norm, **norms, **found}
        metrics |= update_norms(self.weights, previous, self.comm) if detailed else {}
        self._zero_grad()
        if self.masters is not None:
            self.masters.copy_weights_to_model()
        self.objective.after_step(position.after, found_inf)
        if self.average is not None:
            self.average.observe(self.weights)
        return metrics

    def settle(self) -> bool:
        """Reads whether the last step was made, updates the average of the weights, or applies `optimizer.non_finite`.

        Returns whether the step was rolled back. `step` calls it for the step before. Call it before the state is
        saved, evaluated or logged. Collective. Raises ClipxError if the run must stop.
        """
        outcome = self.non_finite.read()
        if outcome is Outcome.made and self.average is not None:
            self.average.update()
        if outcome is Outcome.skipped:
            self._step.undo()
        return outcome is Outcome.rolled_back

    def _unscale(self) -> None:
        """Moves the gradients to the optimizer's weights and divides them by the loss scale."""
        if self.masters is not None:
            self.masters.copy_gradients_from_model()
        self.loss_scale.unscale(self.optimizer)

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters is not None:
            self.model.zero_grad(set_to_none=True)

    def _clip(self) -> Tensor:
        """Clips the gradients if `optimizer.clip_norm` is set. Returns the global gradient norm before clipping."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = self.comm.norm([p.grad for p in parameters if p.grad is not None])
        if self.spec.optimizer.clip_norm is not None:
            own = set(self.objective.parameters())  # never sharded, but the model's parameters may be
            for part in ([p for p in parameters if p in own], [p for p in parameters if p not in own]):
                torch.nn.utils.clip_grads_with_norm_(part, self.spec.optimizer.clip_norm, norm)
        return norm
