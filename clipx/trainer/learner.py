"""The model, objective and optimizer of a run, built from their specs, and their optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clipx.checkpoint.format import Checkpoint
from clipx.config.duration import Length
from clipx.data.batch import Batch
from clipx.data.spec import Classes
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError
from clipx.model.clip import CLIP
from clipx.model.layers import named_blocks
from clipx.model.spec import Varying
from clipx.objective.base import Metrics, ModelFacts, Objective
from clipx.optimizer.groups import parameter_groups, set_learning_rate
from clipx.optimizer.skippable import SkippableStep
from clipx.precision.spec import Precision
from clipx.trainer.backends import configure_backends
from clipx.trainer.compile import CompileSpec
from clipx.trainer.gradcache import GradCache
from clipx.trainer.metrics import clone_weights, gradient_norms, update_norms
from clipx.trainer.nonfinite import NonFiniteSteps, Skipped, restore_scaler, scaler_state
from clipx.trainer.rng import seed_all
from clipx.trainer.spec import RunSpec
from clipx.trainer.state import TrainState

if TYPE_CHECKING:
    from clipx.model.flops import Utilisation
    from clipx.optimizer.master import MasterWeights
    from clipx.teacher.live import Teacher
    from clipx.teacher.stored import StoredTeachers
    from clipx.trainer.ema import WeightAverage
    from clipx.trainer.stages import Stages, Step

_TEXTS = 256  # texts embedded at a time


class Learner:
    """Model, objective and optimizer, and their step: `backward`, `settle` the step before, `update`.

    Args:
        spec: the complete configuration of the run.
        comm: ranks and device.
        length: number of samples of an epoch, of a step and of the run.
        varying: image sizes and patch dropout that change in training.
        classes: classes of the data. None: it has none.
        stored: stored embeddings of teachers. None: there are none.

    Shape:
        - Input of `backward`: a `Batch` of b samples on the device, this rank's share of the global batch.
        - Output of `backward` and `update`: metrics by name, 0-dim tensors on the device.

    Raises:
        ConfigError: an option does not fit the model, the device or the classes of the data.
        CheckpointError: a checkpoint given to `restore` does not fit the model, or is of another teacher.

    Example:
        The first step of a run, made by hand:

            >>> from clipx import Trainer, compose
            >>> options = ["model=tiny", "data=digits", "data.workers=0", "duration=2st", "schedule.warmup=1st"]
            >>> trainer = Trainer(compose(*options, "data.batch_size=32", "run_dir=by_hand"))
            >>> learner, step = trainer.learner, trainer.stages.at(0)
            >>> before = learner.weights.text.embedding_weight.clone()
            >>> metrics = learner.backward(next(trainer.batches()), step)
            >>> _ = learner.settle()
            >>> _ = learner.update(step)
            >>> bool(metrics["loss"] > 0), learner.weights.text.embedding_weight.equal(before)
            (True, False)
            >>> trainer.close()
    """

    spec: RunSpec
    comm: Comm
    precision: Precision
    model: CLIP  # computes forward and backward
    weights: CLIP  # updated by the optimizer: the model itself, or its float32 master
    masters: MasterWeights | None
    parallel: nn.Module  # the model, or its data-parallel wrapper
    average: WeightAverage | None
    objective: Objective
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # disabled unless the number format has a loss scale
    non_finite: NonFiniteSteps
    teacher: Teacher | None  # a live teacher, which embeds each batch
    taught_by: Teacher | StoredTeachers | None  # the same, or stored embeddings
    backends: str  # their settings, for the log
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
        stored: StoredTeachers | None = None,
    ) -> None:
        """Builds the same weights on every rank, then seeds each rank differently. Raises ConfigError.

        `length`, `varying`: of the run. `classes`: of the data. `stored`: embeddings of teachers. Collective.
        """
        self.spec, self.comm = spec, comm
        self.backends = configure_backends(spec.deterministic, comm.device)
        self.precision = spec.precision.build(comm.device)
        logits = spec.objective.teacher_logits
        self.teacher = spec.teacher.build(comm, self.precision, spec.data.micro_batches, logits)
        seed_all(spec.seed)
        self._build_model(varying)
        self.objective = spec.objective.build(comm, length)
        self.objective.prepare(classes, ModelFacts.of(self.weights))
        self.objective.to(comm.device, self.precision.wide)
        self.compile.compile_objective(self.objective)
        self._build_optimizer()
        self.taught_by = stored or self.teacher
        if self.taught_by is not None:
            comm.require_equal(teacher=self.taught_by.digest)
            spec.objective.check_teacher(self.taught_by.widths, self.weights.embed_dim)
        seed_all(spec.seed + 1 + comm.rank)

    def _build_model(self, varying: Varying) -> None:
        """Builds the model: frozen layers and adapters, weights of the optimizer, number format, compiled towers."""
        spec, comm = self.spec, self.comm
        self.weights = self.model = spec.model.build(comm.device, self.precision.stored, varying)
        if spec.model.lock_options:
            from clipx.model.freeze import freeze

            freeze(self.weights, spec.model)
        if spec.model.has_adapters:
            from clipx.model.lora import add_adapters

            add_adapters(self.weights, spec.model)
        self.masters = None
        if self.precision.master_weights:
            from clipx.optimizer.master import MasterWeights

            self.masters = MasterWeights(self.weights, self.precision.dtype)
            self.model = self.masters.model
        self.model.returns_trunk = spec.objective.reads_trunk
        self.converted = spec.precision.convert(named_blocks(self.model))
        blocks = named_blocks(self.model)
        self.compile, self.compile_choice = spec.compile.on_device(comm.device, blocks)
        self.compile.configure(spec.deterministic)
        self.compile.compile_towers(blocks)
        self.average = None
        if spec.optimizer.ema_decay is not None:
            from clipx.trainer.ema import WeightAverage

            self.average = WeightAverage(self.weights, spec.optimizer.ema_decay)
        for model in (self.model, *([self.average.model] if self.average else [])):
            spec.distributed.prepare(model, comm, self.precision.autocast_dtype)

    def _build_optimizer(self) -> None:
        """Builds the optimizer, the data-parallel model, and what one step of them needs."""
        spec, comm = self.spec, self.comm
        self.optimizer = spec.optimizer.build(parameter_groups(self.weights, self.objective, spec.optimizer))
        self.compile.compile_optimizer(self.optimizer)
        self.scaler = self.precision.build_scaler()
        self.state = TrainState(self.weights, self.average, self.objective, self.optimizer, comm, self.masters)
        masters = None if self.masters is None else self.masters.by_parameter
        self.parallel = spec.distributed.wrap(self.model, comm, masters)
        if self.masters is not None:
            self.masters.averaged = self.parallel is not self.model
        self.gradcache = GradCache(
            self.parallel,
            self.objective,
            comm,
            self.precision,
            spec.data.micro_batches,
            self.scaler,
            spec.objective.reads_trunk,
        )
        self.non_finite = NonFiniteSteps(spec.optimizer, self.model, comm, self.scaler)
        self._step = SkippableStep(self.optimizer, comm.device, self.non_finite.preserves)

    def utilisation(self) -> Utilisation | None:
        """Returns what the utilisation of the device by the model is computed from; None if its peak is unknown."""
        spec, tokens = self.spec, self.model.image.most_tokens
        if self.comm.device.type != "cuda" and spec.device_peak_tflops is None:
            return None
        from clipx.model.flops import Utilisation

        return Utilisation.build(spec.model, spec.precision, self.comm.device, spec.device_peak_tflops, tokens)

    def counters(self) -> dict[str, Any]:
        """Returns what a checkpoint has in addition to `state`. Waits for the device."""
        counts, scale = self.non_finite, scaler_state(self.scaler)
        return {
            "non_finite": [counts.total, counts.consecutive],
            "loss_scale": {**scale, "skipped": counts.overflows} if scale else {},
            **({} if self.taught_by is None else {"teacher": self.taught_by.digest}),
        }

    def restore(self, found: Checkpoint, seed: int) -> list[str]:
        """Restores `state` and `counters` from a checkpoint. Returns lines for the log. Raises CheckpointError.

        `seed`: see `TrainState.restore`.
        """
        saved = found.state
        if self.taught_by is not None:
            option = self.spec.teacher.source_option
            _check_same_teacher(saved.get("teacher"), self.taught_by.digest, option, self.spec.run_dir)
        self.non_finite.total, self.non_finite.consecutive = saved["non_finite"]
        scale = saved.get("loss_scale", {})
        restore_scaler(self.scaler, scale)
        self.non_finite.overflows = int(scale.get("skipped", 0)) if self.scaler.is_enabled() else 0
        return self.state.restore(found, seed)

    def roll_back(self, found: Checkpoint, seed: int) -> None:
        """Restores `state` from a checkpoint, and drops the gradients of a step that was begun."""
        self.scaler.update(self.scaler.get_scale())  # forgets the gradients, and keeps the scale
        self._zero_grad()
        self.state.restore(found, seed)

    def metrics(self) -> dict[str, float]:
        """Returns metrics to log: counts of skipped steps, and the loss scale. Waits for the device."""
        counts = self.non_finite
        skipped: dict[str, float] = {"train/left_out_steps": counts.total} if counts.total else {}
        if not self.scaler.is_enabled():
            return skipped
        return {**skipped, "train/loss_scale": self.scaler.get_scale(), "train/skipped_steps": counts.overflows}

    def begin(self, stages: Stages, epoch_samples: int) -> tuple[int, list[str]]:
        """Loads initial weights, or a checkpoint of open_clip's trainer, into a new run.

        The moving average starts with the weights after the first step. Returns the samples seen, and lines for the
        log. Raises ClipxError.
        """
        training = self.spec.resume_point.open_clip
        if training is None:
            return 0, self._load_initial_weights()
        from clipx.trainer.from_open_clip import resume_from_open_clip

        return resume_from_open_clip(training, self, stages, epoch_samples)

    def _load_initial_weights(self) -> list[str]:
        """Loads the weights that `model.weights`, or those of single towers, name. Returns lines for the log."""
        location, lines = self.spec.model.weights, list[str]()
        if location is not None:
            from clipx.weights.load import load_into, load_weights  # for a run with initial weights alone

            found = load_weights(location)
            lines += [location, *load_into(self.weights, found, initial=True)]
            lines += self.objective.adopt_scale(found.log_scale, found.bias)
        if self.spec.model.tower_weights:
            from clipx.weights.tower import load_towers

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

    def backward(self, batch: Batch, step: Step, detailed: bool = False) -> Metrics:
        """Computes the clipped gradients of a step on this rank's share of its batch, and decides whether it is made.

        Collective. The host reads nothing. Call `update` after it, or `restore` to drop the gradients.

        Args:
            batch: the batch, on the device.
            step: position and settings of the step.
            detailed: whether to return the norm of each tower's gradient, too.

        Returns:
            0-dim tensors that the host has not read: loss, norm of the gradient, and metrics of the objective.
        """
        set_learning_rate(self.optimizer, step.learning_rate)
        self.model.image.set_patch_dropout(step.patch_dropout)
        self.objective.before_step(step.start)
        self.non_finite.before_forward()
        batch = batch if self.teacher is None else self.teacher(batch)
        loss, metrics, finite = self.gradcache.forward_backward(batch)
        self._unscale()
        norms = gradient_norms(self.weights, self.comm) if detailed else {}
        norm = self._clip()
        self.non_finite.decide(loss, norm, finite)
        return {"loss": loss, "grad_norm": norm, **norms, **metrics}

    def update(self, step: Step, detailed: bool = False) -> Metrics:
        """Updates weights, objective and average by the gradients of `backward`, unless they are not finite.

        A step whose loss or gradient is not finite changes nothing; `non_finite.found_inf` is then 1. Collective. The
        host reads nothing.

        Returns the norms of each tower's update if `detailed`, which needs a copy of the weights; else nothing.
        """
        previous = clone_weights(self.weights) if detailed else {}
        found_inf = self.non_finite.found_inf
        self._step(found_inf)
        self.scaler.update()
        self.non_finite.after_update(step.number)
        norms = update_norms(self.weights, previous, self.comm) if detailed else {}
        self._zero_grad()
        if self.masters is not None:
            self.masters.copy_weights_to_model()
        self.objective.after_step(step.end, found_inf)
        if self.average is not None:
            self.average.observe(self.weights)
        return norms

    def settle(self) -> Skipped | None:
        """Reads whether the last step was made, if that is not known, and completes it: the average of the weights.

        Returns the step if `optimizer.non_finite` applies to it. Call it before the next `update`, and before the state
        is saved, evaluated or logged. Collective.
        """
        if not self.non_finite.is_pending:
            return None
        skipped = self.non_finite.read()
        if not self.non_finite.made:
            self._step.undo()
        elif self.average is not None:
            self.average.update()
        return skipped

    def _unscale(self) -> None:
        """Moves the gradients to the optimizer's weights and divides them by the loss scale."""
        if self.masters is not None:
            self.masters.copy_gradients_from_model()
        self.scaler.unscale_(self.optimizer)

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


def _check_same_teacher(before: str | None, now: str, option: str | None, run_dir: str) -> None:
    """Raises CheckpointError if the digest of the teacher that `option` gives differs from that in the checkpoint."""
    if before != now:
        raise CheckpointError(
            f"{option} is not the teacher of {run_dir} (digest {now}, in the checkpoint {before}): give that teacher, "
            "or start a new run"
        )
