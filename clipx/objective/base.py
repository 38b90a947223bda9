"""The base class of objectives: modules that compute everything after the embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from clipx.errors import without_effect
from clipx.objective.losses.temperature import GlobalTemperature

if TYPE_CHECKING:
    from clipx.data.loader import TargetSource
    from clipx.data.spec import Classes
    from clipx.model.clip import CLIP
    from clipx.model.text_spec import TextTowerSpec

Metrics = dict[str, Tensor]
"""0-dim tensors on the device by name. The trainer reads them together when it logs."""


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""`torch.compile` with the options of the run."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of an objective for one step: this rank's share of the global batch, one row per sample.

    Args:
        image: embeddings of the images.
        text: embeddings of the captions.
        index: positions of the samples in the data set, on the host. State of each sample is found by them.
        outputs: further outputs of the model with gradient, e.g. the losses of a captioner.
        targets: targets of the batch without gradient: labels, or embeddings of a teacher.
        captions: digests of the captions, on the host. None unless the objective compares captions.
        tokens: token ids of the drawn captions with padding, on the host. None: not given.
        trunk: pooled features of the image trunk before the projection. None unless the objective has `reads_trunk`.

    Shape:
        b local batch, D embedding, k captions of a sample, L length of a text, W width of the trunk.

        - `image`: `[b, D]`, unit norm, float32 or float64.
        - `text`: `[k·b, D]`, unit norm; `[b, 0]` for an objective that reads no texts.
        - `index`: `[b]`, int64, in `[0, samples)`.
        - `targets`: `[b, …]` each.
        - `captions`: `[b, k]`, int64.
        - `tokens`: `[k·b, L]`, int64.
        - `trunk`: `[b, W]`, float32 or wider.

    Raises:
        FrozenInstanceError: a field is assigned. Use `dataclasses.replace`.

    Example:
        Four matching pairs of orthogonal embeddings, for an objective of a run on one rank:

            >>> import torch
            >>> from clipx import compose
            >>> from clipx.config import Length
            >>> from clipx.objective.base import StepInputs
            >>> spec = compose("objective=infonce", "distributed.device=cpu")
            >>> objective = spec.objective.build(spec.distributed.build(), Length(epoch=1438, batch=4))
            >>> inputs = StepInputs(image=torch.eye(4, 16), text=torch.eye(4, 16), index=torch.arange(4))
            >>> loss, metrics = objective(inputs)
            >>> loss.shape, bool(loss < 0.01), round(metrics["temperature"].item(), 2)
            (torch.Size([]), True, 0.07)
    """

    image: Tensor  # [b, D], unit norm, float32 or float64
    text: Tensor  # [b, D], unit norm; [b, 0] for an objective that does not read texts; [k·b, D] for k captions each
    index: Tensor  # [b] int64 on the host: positions of the samples in the data set, in [0, samples)
    outputs: tuple[Tensor, ...] = ()  # further outputs of the model with gradient, e.g. the losses of a captioner
    targets: tuple[Tensor, ...] = ()  # targets of the batch without gradient: labels, embeddings of a teacher
    captions: Tensor | None = None  # [b, k] int64 on the host: digests of the captions, for an objective that compares
    tokens: Tensor | None = None  # [k·b, L] int64 on the host: token ids of the drawn captions, with padding
    trunk: Tensor | None = None  # [b, W] features of CLIP.encode_trunk, for an objective with `reads_trunk`


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of the model for which an objective creates its parameters."""

    embed_dim: int
    """D, the width of the embeddings."""

    trunk_width: int | None = None
    """W, the width of `StepInputs.trunk`. None: unknown."""

    vocabulary: int | None = None
    """V, the number of token embeddings: token ids are below it. None: unknown."""

    text: TextTowerSpec | None = None
    """Options of the text tower, which build the tokenizer. None: unknown."""

    @classmethod
    def of(cls, model: CLIP) -> Self:
        """Returns the facts of a model."""
        return cls(model.embed_dim, model.trunk_width, model.text.embedding_weight.shape[0], model.spec.text)


class Objective(nn.Module):
    """Scores the local batch against the global batch. b local batch, B global batch, D embedding; unit norm, float32.

    Holds the temperature, the bias and the per-sample state, and gathers the embeddings. On each rank the loss has the
    global value, and its gradient with respect to this rank's embeddings is that of the global loss. The gradient with
    respect to the objective's parameters is this rank's share: sum it over the ranks.

    Args:
        inputs: this rank's share of the global batch, for `forward`. A subclass has further arguments of its own.

    Shape:
        - Input of `forward`: `StepInputs` of `[b, D]` embeddings.
        - Output: the loss of the global batch, 0-dim, and metrics by name, 0-dim each.

    Raises:
        ConfigError: `prepare` finds that the classes or the model do not fit; `compile_tiles` has nothing to compile.
        NotImplementedError: a subclass has no `forward`.

    Example:
        The mean distance of the matching pairs of the global batch:

            >>> import torch
            >>> from clipx.distributed import Comm
            >>> from clipx.objective.base import Objective, StepInputs
            >>> class Distance(Objective):
            ...     def __init__(self, comm):
            ...         super().__init__()
            ...         self.comm = comm
            ...     def forward(self, inputs):
            ...         image_BD, text_BD = map(self.comm.gather_with_gradient, (inputs.image, inputs.text))
            ...         loss = 1 - (image_BD * text_BD).sum(1).mean()
            ...         return loss, {"similarity": 1 - loss.detach()}
            >>> objective = Distance(Comm(rank=0, world=1, local_rank=0, device=torch.device("cpu")))
            >>> loss, metrics = objective(StepInputs(torch.eye(4, 16), torch.eye(4, 16), torch.arange(4)))
            >>> loss.item(), metrics
            (0.0, {'similarity': tensor(1.)})
    """

    constant_lr: float | None = None
    """Learning rate of the objective's parameters, without warm-up or schedule. None: that of the model."""

    def prepare(self, classes: Classes | None, model: ModelFacts) -> None:
        """Creates what depends on the classes of the data and on the model. Called once, before any other method.

        Raises ConfigError.
        """

    def adopt_scale(self, log_scale: float | None, bias: float | None) -> list[str]:
        """Starts from the log α and the β of the initial weights, where the objective learns them.

        None: the weights have no such value. Returns lines for the log.
        """
        learned = [child for child in self.children() if isinstance(child, GlobalTemperature)]
        lines = [] if log_scale is None else [temperature.adopt_scale(log_scale) for temperature in learned]
        if log_scale is not None and not learned:
            lines.append(
                f"ignored the temperature {math.exp(-log_scale):.4g} of the weights: this objective learns no global "
                "temperature"
            )
        if bias is not None and not self.adopt_bias(bias):
            lines.append(f"ignored the bias {bias:.4g} of the weights: this objective has no bias")
        return lines

    def adopt_bias(self, bias: float) -> bool:
        """Starts from this β. Returns whether the objective has a bias."""
        return False

    def initialize(self, embed: Callable[[Sequence[str]], Tensor]) -> None:
        """Initializes parameters from the embeddings of texts. Called once in a new run, after its initial weights are
        loaded. `embed` returns [N, D] for N texts. Collective."""

    @property
    def target_source(self) -> TargetSource | None:
        """Reads the targets of each sample in the loader. None: the objective needs no targets."""
        return None

    def compile_tiles(self, compiler: Compiler) -> None:
        """Compiles the functions that the loss calls on each tile, for `compile.objective=true`. Raises ConfigError."""
        raise without_effect("compile.objective=true", f"on {type(self).__name__}, which has no tiles to compile")

    def score(self, image_ND: Tensor, labels: Sequence[int | str | None]) -> dict[str, float]:
        """Returns metrics of the objective's head on held-out images by name; empty for an objective without a head."""
        return {}

    def before_step(self, samples_seen: int) -> None:
        """Updates what depends on progress. Called before each forward pass, also before the first after a resume."""

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        """Returns the loss of the global batch, 0-dim, and metrics. Collective."""
        raise NotImplementedError

    def after_step(self, samples_seen: int, found_inf: Tensor | None = None) -> None:
        """Clamps the objective's parameters and commits per-sample state. Called once after each optimizer step.

        `found_inf`: 0-dim, 1 if the optimizer skipped the step, for which state must not change; None: 0. Do not read
        it on the host: the device has not computed it.
        """
