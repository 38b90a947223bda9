"""What an objective is: a module that owns everything after the embeddings."""

from __future__ import annotations

from torch import Tensor, nn

Metrics = dict[str, Tensor]
"""0-dim tensors on the device, by name; read together when logging."""


class Objective(nn.Module):
    """Scores the local batch against the global one. b local batch, B global batch, D embedding; unit norm, float32.

    index_b are the samples' numbers in the data set, in [0, samples), on the host.

    Owns temperature, bias, per-sample state and the gathers. On each rank the loss has the global value, and its
    gradient is that of the global loss with respect to this rank's embeddings; with respect to the objective's own
    parameters it is this rank's share, to be summed over the ranks.
    """

    constant_lr: float | None = None
    """Learning rate of the objective's own parameters, without warm-up or schedule. None: the model's."""

    def before_step(self, samples_seen: int) -> None:
        """Schedules what depends on progress. Called before each step's forward, also the first after a resume."""

    def forward(self, image_bD: Tensor, text_bD: Tensor, index_b: Tensor) -> tuple[Tensor, Metrics]:
        raise NotImplementedError

    def after_step(self, samples_seen: int) -> None:
        """Clamps own parameters and commits per-sample state. Called once after each optimizer step, and not at all
        where the step was skipped."""
