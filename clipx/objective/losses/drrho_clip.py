"""The robust global contrastive loss on pair losses minus those of a reference model (arXiv:2505.06699).

The loss of a pair is the difference of similarities s_ij - s_ii; that of the reference is r_ij - r_ii, with r the
similarities of its embeddings. Their difference is that of the similarities s - r, which are the products of
concatenated embeddings:

    s_ij - r_ij = [x_i, -p_i]·[y_j, q_j]        x, y of the model, p, q of the reference

so that the kernel of `contrastive` computes loss and gradients; the gradient of the reference's columns is not used.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from clipx.objective.base import Metrics, StepInputs
from clipx.objective.losses.fcco import GlobalFCCO


class DRRhoCLIP(GlobalFCCO):
    """`GlobalFCCO` on the similarities s - r. Targets: the reference's image_bT and text_bT, whose products are r."""

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        reference_image_bT, reference_text_bT = inputs.targets
        image = _joined(inputs.image, -reference_image_bT)
        return GlobalFCCO.forward(self, replace(inputs, image=image, text=_joined(inputs.text, reference_text_bT)))


def _joined(own_bD: Tensor, reference_bT: Tensor) -> Tensor:
    """Returns both embeddings side by side, in float32 or the wider format of the model's; no gradient of the
    reference."""
    dtype = torch.promote_types(own_bD.dtype, torch.float32)
    return torch.cat([own_bD.to(dtype), reference_bT.detach().to(dtype)], 1)
