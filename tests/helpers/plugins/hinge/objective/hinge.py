"""Hinge loss over all pairs of the global batch (VSE, arXiv:1411.2539)."""

import torch
from torch import Tensor

from clipx.config import Length, frozen, option, register
from clipx.distributed import Comm
from clipx.objective import ObjectiveSpec
from clipx.objective.base import Metrics, Objective, StepInputs


@register("objective")  # registers its options as /schema/objective/hinge
@frozen
class HingeSpec(ObjectiveSpec):
    """Hinge loss over all pairs of the global batch."""

    kind: str = "hinge"
    """Type of the objective; set by objective=hinge."""

    margin: float = option(0.2, gt=0)
    """Margin in cosine similarity by which the matching pair must exceed all others."""

    def build(self, comm: Comm, length: Length) -> Objective:
        return Hinge(comm, self.margin)


class Hinge(Objective):
    """Computes max(0, margin + s_ij - s_ii), summed over the other texts of an image and images of a text. Mean over B."""

    def __init__(self, comm: Comm, margin: float) -> None:
        super().__init__()
        self.comm, self.margin = comm, margin

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        image_BD, text_BD = map(self.comm.gather_with_gradient, (inputs.image, inputs.text))
        score_BB = image_BD @ text_BD.T
        right_B = score_BB.diagonal()
        wrong_BB = ~torch.eye(len(score_BB), dtype=torch.bool, device=score_BB.device)
        of_image_BB = (self.margin + score_BB - right_B[:, None]).relu() * wrong_BB
        of_text_BB = (self.margin + score_BB - right_B[None, :]).relu() * wrong_BB
        loss = (of_image_BB + of_text_BB).sum() / len(score_BB)
        return loss, {"violations": (of_image_BB.detach() > 0).float().mean()}
