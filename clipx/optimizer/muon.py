"""Muon for hidden matrices and AdamW for all other parameters, from timm: one optimizer, one state, one schedule."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import frozen, option
from clipx.errors import require
from clipx.optimizer.spec import Group, OptimizerSpec, check_betas

if TYPE_CHECKING:
    import torch

    from clipx.model.clip import CLIP


@option("optimizer")
@frozen
class MuonSpec(OptimizerSpec):
    """The running mean of a hidden matrix's gradient, orthogonalized by five Newton-Schulz steps in bfloat16
    (https://kellerjordan.github.io/posts/muon/). The factor 0.2·√max(rows, columns) scales it to the size of AdamW's
    step, so that lr and weight_decay of AdamW apply to all parameters (arXiv:2502.16982).

    Hidden matrices are the weights of linear layers and convolutions inside the towers' blocks: a fused qkv as one
    matrix, a kernel as out × (in·height·width). AdamW trains the rest: embeddings (of patches, tokens, positions),
    stems, depthwise and grouped kernels, pooling heads, projections, norms, biases, the objective's parameters, and
    low-rank adapters: a factor of a product is defined only up to an invertible matrix.

    With distributed=fsdp each rank orthogonalizes its share of the matrices, gathered for it.
    """

    kind: str = "muon"
    """Type of the optimizer; set by optimizer=muon."""

    momentum: float = 0.95
    """Decay rate of the running mean of a hidden matrix's gradient, in (0, 1); 0.95 is usual."""

    nesterov: bool = True
    """Nesterov momentum for the hidden matrices. The default is that of Muon's author."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    """AdamW's decay rates of the running means of the gradient and of its square, for all parameters other than hidden
    matrices: two numbers in [0, 1)."""

    eps: float = 1e-6
    """Term added to the denominator of AdamW, for all parameters other than hidden matrices. Above 0; 1e-6 for ViTs,
    1e-8 for ConvNets."""

    shardable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        OptimizerSpec.__post_init__(self)
        require(0 < self.momentum < 1, f"optimizer.momentum={self.momentum} must be in (0, 1): 0.95 is usual")
        check_betas(self.betas, "[0.9,0.98]")
        require(self.eps > 0, f"optimizer.eps={self.eps} must be above 0: 1e-6 for ViTs, 1e-8 for ConvNets")

    def special(self, model: CLIP, decay: Collection[str]) -> tuple[Collection[str], Group]:
        from clipx.model.layers import hidden_matrices

        # Here eps is the smallest norm that Newton-Schulz divides by; in the other groups it is AdamW's.
        options: Group = {"use_muon": True, "nesterov": self.nesterov, "eps": 1e-7}
        matrices = hidden_matrices(model, "optimizer=muon")
        require(
            not model.spec.has_adapters or bool(matrices & set(decay)),
            "optimizer=muon has no effect if no hidden matrix is trained, and adapters are trained by AdamW: choose "
            "optimizer=adamw",
        )
        return matrices, options

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        from clipx.optimizer.sharded_muon import ShardedMuon

        return ShardedMuon(
            [{"use_muon": False, **group} for group in groups],  # without it timm selects matrices by their shape
            lr=self.lr,
            momentum=self.momentum,
            nesterov=False,  # True would make timm use NAdamW instead of AdamW
            ns_coefficients="original",
            adjust_lr_fn="match_rms_adamw",
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
        )
