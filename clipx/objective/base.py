"""What an objective is: a module that owns everything after the embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from clipx.errors import ConfigError
from clipx.objective.losses.temperature import GlobalTemperature

if TYPE_CHECKING:
    from clipx.data.labels import Labels
    from clipx.data.spec import Classes

Metrics = dict[str, Tensor]
"""0-dim tensors on the device, by name; read together when logging."""


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""`torch.compile` with the options of a run."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What an objective sees of one step: this rank's share of the global batch, one row a sample."""

    image: Tensor  # [b, D], unit norm, float32 or float64
    text: Tensor  # [b, D], unit norm; [b, 0] for an objective that does not read texts
    index: Tensor  # [b] int64 on the host: numbers of the samples in the data set, in [0, samples)
    outputs: tuple[Tensor, ...] = ()  # further outputs of the model, as a captioner's losses; differentiated
    targets: tuple[Tensor, ...] = ()  # of the batch, without gradient: labels, a teacher's embeddings


class Objective(nn.Module):
    """Scores the local batch against the global one. b local batch, B global batch, D embedding; unit norm, float32.

    Owns temperature, bias, per-sample state and the gathers. On each rank the loss has the global value, and its
    gradient is that of the global loss with respect to this rank's embeddings; with respect to the objective's own
    parameters it is this rank's share, to be summed over the ranks.
    """

    constant_lr: float | None = None
    """Learning rate of the objective's own parameters, without warm-up or schedule. None: the model's."""

    def prepare(self, classes: Classes | None, width: int) -> None:
        """Makes what depends on the data's classes and on D. Called once, before anything else. Raises ConfigError."""

    def adopt_scale(self, log_scale: float | None, bias: float | None) -> list[str]:
        """Goes on from the log α and the β that the first weights were trained with, as far as it learns the like; None
        for what they have not. Returns what the log should say."""
        learned = [child for child in self.children() if isinstance(child, GlobalTemperature)]
        told = [] if log_scale is None else [temperature.adopt_scale(log_scale) for temperature in learned]
        if log_scale is not None and not learned:
            told.append(
                f"the weights' temperature {math.exp(-log_scale):.4g} is left: this objective learns none for all"
            )
        if bias is not None and not self.adopt_bias(bias):
            told.append(f"the weights' bias {bias:.4g} is left: this objective has none")
        return told

    def adopt_bias(self, bias: float) -> bool:
        """Begins with this β. Whether it has one."""
        return False

    def initialize(self, embed: Callable[[Sequence[str]], Tensor]) -> None:
        """Called once, when a new run has its first weights; `embed` gives their [N, D] of N texts. Collective."""

    @property
    def target_source(self) -> Labels | None:
        """Reads the targets of each sample in the loader; None where it needs none."""
        return None

    def compile_tiles(self, compiler: Compiler) -> None:
        """Compiles the functions that the loss calls on each tile: `compile.objective=true`. Raises ConfigError."""
        raise ConfigError(
            f"compile.objective=true has no effect on {type(self).__name__}, which has no tiles to compile: "
            "leave it out"
        )

    def score(self, image_ND: Tensor, labels: Sequence[int | str | None]) -> dict[str, float]:
        """What its own weights say of held-out images, by name; of an objective without any nothing."""
        return {}

    def before_step(self, samples_seen: int) -> None:
        """Schedules what depends on progress. Called before each step's forward, also the first after a resume."""

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        """Returns the loss of the global batch, 0-dim, and metrics. Collective."""
        raise NotImplementedError

    def after_step(self, samples_seen: int) -> None:
        """Clamps own parameters and commits per-sample state. Called once after each optimizer step, and not at all
        where the step was skipped."""
