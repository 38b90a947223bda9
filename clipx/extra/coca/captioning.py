"""Weighted sum of a contrastive loss and a caption loss."""

from __future__ import annotations

from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.objective.base import Metrics, StepInputs
from clipx.objective.losses.contrastive import Contrastive, Normaliser, Tiling
from clipx.objective.losses.temperature import Temperature


class Captioning(Contrastive):
    """Weighted sum of a contrastive loss and the mean caption loss over all tokens of the global batch.

    The mean is exact for any number of ranks and micro-batches. open_clip averages the means of the ranks instead,
    which gives the tokens of a rank with fewer tokens a larger weight.
    """

    def __init__(
        self,
        comm: Comm,
        temperature: Temperature,
        normaliser: Normaliser,
        tiling: Tiling,
        contrastive_weight: float,
        caption_weight: float,
    ) -> None:
        super().__init__(comm, temperature, normaliser, tiling)
        self.contrastive_weight, self.caption_weight = contrastive_weight, caption_weight

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        """Returns the loss and metrics. Reads one further output of the model, caption_b2: -log p of each caption,
        summed over its tokens, and the number of its tokens."""
        (caption_b2,) = inputs.outputs
        contrastive, metrics = super().forward(inputs)
        caption = token_mean(caption_b2, self.comm)
        loss = self.contrastive_weight * contrastive + self.caption_weight * caption
        return loss, {"contrastive_loss": contrastive.detach(), "caption_loss": caption.detach(), **metrics}


def token_mean(caption_b2: Tensor, comm: Comm) -> Tensor:
    """Returns Σ of column 0 / Σ of column 1 over all ranks, 0-dim. Its gradient is that of this rank's rows.
    Collective."""
    own, total_2 = caption_b2[:, 0].sum(), comm.sum(caption_b2.detach().sum(0))
    share = own / total_2[1]
    return share + (total_2[0] / total_2[1] - share).detach()
