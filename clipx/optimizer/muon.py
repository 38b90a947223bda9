"""Muon with AdamW for what is no hidden matrix, from timm: one optimizer, one state, one schedule."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clipx.config.registry import option
from clipx.errors import require
from clipx.optimizer.spec import Group, OptimizerSpec, check_betas

if TYPE_CHECKING:
    import torch

    from clipx.model.clip import CLIP


@option("optimizer")
@dataclass(kw_only=True, slots=True)
class MuonSpec(OptimizerSpec):
    """The running mean of a hidden matrix's gradient, made orthogonal by five Newton-Schulz steps in bfloat16
    (https://kellerjordan.github.io/posts/muon/). Times 0.2·√max(rows, columns) it is of the size of AdamW's step, so
    lr and weight_decay are AdamW's, for all parameters (arXiv:2502.16982).

    Hidden matrices are the weights of linear layers and convolutions inside the towers' blocks: a fused qkv as one
    matrix, a kernel as out × (in·height·width). AdamW trains the rest: embeddings (of patches, tokens, positions),
    stems, depthwise and grouped kernels, pooling heads, projections, norms, biases and the objective's own.
    """

    kind: str = "muon"
    momentum: float = 0.95
    nesterov: bool = True
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])  # AdamW's
    eps: float = 1e-6  # AdamW's

    def __post_init__(self) -> None:
        OptimizerSpec.__post_init__(self)
        require(0 < self.momentum < 1, f"optimizer.momentum={self.momentum} must lie in (0, 1): 0.95 is usual")
        check_betas(self.betas, "[0.9,0.98]")
        require(self.eps > 0, f"optimizer.eps={self.eps} must be above 0: 1e-6 for ViTs, 1e-8 for ConvNets")

    def special(self, model: CLIP, decay: Collection[str]) -> tuple[Collection[str], Group]:
        from clipx.optimizer.layers import hidden_matrices

        # eps is the least norm that Newton-Schulz divides by, and AdamW's in the other groups.
        options: Group = {"use_muon": True, "nesterov": self.nesterov, "eps": 1e-7}
        return hidden_matrices(model, "optimizer=muon"), options

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        from timm.optim import Muon

        optimizer: torch.optim.Optimizer = Muon(
            [{"use_muon": False, **group} for group in groups],  # else timm goes by the shape
            lr=self.lr,
            momentum=self.momentum,
            nesterov=False,  # with it timm has NAdamW in AdamW's place
            ns_coefficients="original",
            adjust_lr_fn="match_rms_adamw",
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
        )
        return optimizer
