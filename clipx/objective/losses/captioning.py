"""A contrastive loss and the captions' loss, weighed against each other."""

from __future__ import annotations

from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.objective.base import Metrics, StepInputs
from clipx.objective.losses.contrastive import Contrastive, Normaliser
from clipx.objective.losses.temperature import Temperature


class Captioning(Contrastive):
    """The captions' loss is the mean over all tokens of the global batch: exact for any ranks and micro-batches.

    open_clip averages the means of the ranks, where a token weighs more the fewer its rank has.
    """

    def __init__(
        self,
        comm: Comm,
        temperature: Temperature,
        normaliser: Normaliser,
        tile: int,
        contrastive_weight: float,
        caption_weight: float,
    ) -> None:
        super().__init__(comm, temperature, normaliser, tile)
        self.contrastive_weight, self.caption_weight = contrastive_weight, caption_weight

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        """Takes one more output of the model, caption_b2: -log p of each caption, summed over its tokens, and their
        number."""
        (caption_b2,) = inputs.outputs
        contrastive, metrics = super().forward(inputs)
        caption = token_mean(caption_b2, self.comm)
        loss = self.contrastive_weight * contrastive + self.caption_weight * caption
        return loss, {"contrastive_loss": contrastive.detach(), "caption_loss": caption.detach(), **metrics}


def token_mean(caption_b2: Tensor, comm: Comm) -> Tensor:
    """Σ of column 0 over Σ of column 1, of all ranks; its gradient is that of this rank's rows. 0-dim."""
    own, total_2 = caption_b2[:, 0].sum(), comm.sum(caption_b2.detach().sum(0))
    share = own / total_2[1]
    return share + (total_2[0] / total_2[1] - share).detach()
