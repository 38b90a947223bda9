"""Hinge loss on the hardest negative.

Shape suffixes: B samples of the global batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipx.distributed import Comm
from clipx.objective.base import Metrics, Objective, StepInputs


class HardestNegative(Objective):
    """Computes max(0, margin + max_j s_ij - s_ii) for each image and each text, j ≠ i. Mean over B and both sides."""

    def __init__(self, comm: Comm, margin: float) -> None:
        super().__init__()
        self.comm, self.margin = comm, margin

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        image_BD, text_BD = map(self.comm.gather_with_gradient, (inputs.image, inputs.text))
        score_BB = image_BD @ text_BD.T
        right_B = score_BB.diagonal()
        wrong_BB = score_BB.masked_fill(torch.eye(len(score_BB), dtype=torch.bool, device=score_BB.device), -torch.inf)
        of_image_B = (self.margin + wrong_BB.amax(1) - right_B).relu()
        of_text_B = (self.margin + wrong_BB.amax(0) - right_B).relu()
        return (of_image_B + of_text_B).mean() / 2, {"violations": (of_image_B.detach() > 0).float().mean()}
