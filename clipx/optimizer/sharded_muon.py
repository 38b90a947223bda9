"""Muon on matrices that FSDP shards by rows: each rank orthogonalizes its share of the whole matrices.

Momentum and weights stay sharded. The matrices are distributed round-robin over the ranks that share a copy of the
model: one all-to-all gives each rank the rows of a matrix, one returns the rows of the orthogonalized matrix, both in
bfloat16, in which Newton-Schulz computes (distributed Muon: arXiv:2502.16982, section 2.3; arXiv:2504.05295).

Shape suffixes: M rows of a matrix, m rows of this rank, N columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from timm.optim import Muon
from timm.optim.muon import get_lr_scale, zeropower_via_newtonschulz
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Update of one hidden matrix on its way: this rank's rows, before and after orthogonalization."""

    weight_mN: Tensor  # this rank's rows of the weight, a kernel as out x (in * height * width)
    update_mN: Tensor  # bfloat16
    shape: tuple[int, int]  # (M, N)
    rows: tuple[int, ...]  # rows of each rank
    group: Any  # process group of the ranks that share a copy
    options: dict[str, Any]


class ShardedMuon(Muon):  # type: ignore[misc]
    """timm's Muon, also for groups with `use_muon` whose parameters are sharded by rows over the ranks."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Performs a single optimization step. Collective if parameters are sharded."""
        sharded = [
            (p, p.grad, group)
            for group in self.param_groups
            for p in group["params"]
            if group["use_muon"] and p.grad is not None and isinstance(p, DTensor)
        ]
        if sharded:
            self._step_sharded(sharded)
        for p, _, _ in sharded:
            p.grad = None  # timm skips it
        loss: float | None = super().step(closure)
        for p, gradient, _ in sharded:
            p.grad = gradient
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _step_sharded(self, sharded: Sequence[tuple[DTensor, DTensor, dict[str, Any]]]) -> None:
        matrices = [self._momentum(*one) for one in sharded]
        groups = {matrix.group: len(matrix.rows) for matrix in matrices}
        for group, ranks in groups.items():
            # Matrices of one size together, so that the ranks of a round have the same work.
            own = sorted((m for m in matrices if m.group is group), key=lambda m: m.shape[0] * m.shape[1])
            for start in range(0, len(own), ranks):
                _orthogonalize(own[start : start + ranks], dist.get_rank(group), ranks)

    def _momentum(self, p: DTensor, gradient: DTensor, options: dict[str, Any]) -> _Matrix:
        """Decays the weight and updates its running mean. Returns the matrix to orthogonalize."""
        state = self.state[p]
        state.setdefault("use_muon", True)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        weight, grad, mean = p.to_local(), gradient.to_local(), state["momentum_buffer"].to_local()
        weight.mul_(1 - options["lr"] * options["weight_decay"])
        mean.lerp_(grad, 1 - options["momentum"])
        update = grad.lerp(mean, options["momentum"]) if options["nesterov"] else mean
        dim = next(i for i, placement in enumerate(p.placements) if not isinstance(placement, Replicate))
        ranks, rows = p.device_mesh.size(dim), p.shape[0]
        each = -(-rows // ranks)
        counts = tuple(max(0, min(each, rows - each * rank)) for rank in range(ranks))
        shape = rows, p.numel() // rows
        at = torch.device(p.device_mesh.device_type)  # with cpu_offload the shards are on the host
        update_mN = update.reshape(-1, shape[1]).to(at, torch.bfloat16)
        return _Matrix(weight.view(-1, shape[1]), update_mN, shape, counts, p.device_mesh.get_group(dim), options)


def _orthogonalize(matrices: Sequence[_Matrix], rank: int, ranks: int) -> None:
    """Orthogonalizes one matrix on each rank and updates the weights. There are at most as many matrices as ranks."""
    own = matrices[rank] if rank < len(matrices) else None
    sent = [len(m.update_mN) * m.shape[1] for m in matrices] + [0] * (ranks - len(matrices))
    received = [0] * ranks if own is None else [rows * own.shape[1] for rows in own.rows]
    group = matrices[0].group
    whole = _exchange(torch.cat([m.update_mN.flatten() for m in matrices]), sent, received, group)
    if own is not None:
        whole = _direction(whole.view(own.shape), own.options).flatten()
    parts = _exchange(whole, received, sent, group).split(sent)
    for matrix, part in zip(matrices, parts, strict=False):
        options = matrix.options
        scale = get_lr_scale(torch.Size(matrix.shape), options["adjust_lr_fn"])
        update_mN = part.view(matrix.weight_mN.shape).to(matrix.weight_mN.device)
        matrix.weight_mN.add_(update_mN, alpha=-options["lr"] * scale)


def _direction(update_MN: Tensor, options: dict[str, Any]) -> Tensor:
    coefficients = [(3.4445, -4.7750, 2.0315)]  # timm's "original"
    out: Tensor = zeropower_via_newtonschulz(
        update_MN,
        options["ns_steps"],
        coefficients,
        eps=options["eps"],
        safety_factor=options["safety_factor"],
        scale_eps=options["scale_eps"],
    )
    return out


def _exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out
