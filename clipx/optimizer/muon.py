"""Muon for hidden matrices and AdamW for all other parameters, from timm: one optimizer, one state, one schedule."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.errors import require_effect
from clipx.optimizer.spec import AdaptiveSpec, Group

if TYPE_CHECKING:
    import torch

    from clipx.model.clip import CLIP


@register("optimizer")
@frozen
class MuonSpec(AdaptiveSpec):
    """The running mean of a hidden matrix's gradient, orthogonalized by five Newton-Schulz steps in bfloat16
    (https://kellerjordan.github.io/posts/muon/). The factor 0.2·√max(rows, columns) scales it to the size of AdamW's
    step, so that lr and weight_decay of AdamW apply to all parameters (arXiv:2502.16982).

    Hidden matrices are the weights of linear layers and convolutions inside the towers' blocks: a fused qkv as one
    matrix, a kernel as out × (in·height·width). AdamW trains the rest: embeddings (of patches, tokens, positions),
    stems, depthwise and grouped kernels, pooling heads, projections, norms, biases, the objective's parameters, and
    low-rank adapters, with betas and eps: a factor of a product is defined only up to an invertible matrix.

    With distributed=fsdp each rank orthogonalizes its share of the matrices, gathered for it.
    """

    kind: str = "muon"
    """Type of the optimizer; set by optimizer=muon."""

    momentum: float = option(0.95, gt=0, lt=1, hint="0.95 is usual")
    """Decay rate of the running mean of a hidden matrix's gradient; 0.95 is usual."""

    nesterov: bool = True
    """Nesterov momentum for the hidden matrices. The default is that of Muon's author."""

    shardable: ClassVar[bool] = True

    def special(self, model: CLIP, decay: Collection[str]) -> tuple[Collection[str], Group]:
        from clipx.model.layers import hidden_matrices

        # Here eps is the smallest norm that Newton-Schulz divides by; in the other groups it is AdamW's.
        options: Group = {"use_muon": True, "nesterov": self.nesterov, "eps": 1e-7}
        matrices = hidden_matrices(model, "optimizer=muon")
        trains_some = not model.spec.has_adapters or bool(matrices & set(decay))
        reason = "if no hidden matrix is trained, and adapters are trained by AdamW"
        require_effect(trains_some, "optimizer=muon", reason, "choose optimizer=adamw")
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
