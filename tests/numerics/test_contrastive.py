"""The contrastive kernel at several tiles and temperatures. test_objectives.py tests the objectives built on it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.objective.losses.contrastive import Tiling, contrastive_loss, in_batch

COMM = Comm(rank=0, world=1, local_rank=0, device=torch.device("cpu"))


def features(batch: int, width: int = 16, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (F.normalize(torch.randn(batch, width, generator=generator, dtype=dtype), dim=-1) for _ in range(2))
    return x.requires_grad_(), y.requires_grad_()


def by_double_loop(x: Tensor, y: Tensor, scale: float) -> float:
    """Returns the mean over images and texts of -log softmax of the matching pair."""
    total = 0.0
    n = len(x)
    for i in range(n):
        for a, b in ((x, y), (y, x)):
            z = [scale * torch.dot(a[i], b[j]).item() for j in range(n)]
            total += math.log(sum(math.exp(v) for v in z)) - z[i]
    return total / (2 * n)


def dense(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Returns the same loss by cross_entropy over the full matrix, for autograd."""
    logits, labels = scale * x @ y.T, torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def loss_and_gradients(function, x: Tensor, y: Tensor, scale: float) -> list[Tensor]:
    alpha = torch.tensor(scale, dtype=x.dtype, requires_grad=True)
    loss = function(x, y, alpha)
    return [loss, *torch.autograd.grad(loss, (x, y, alpha))]


def kernel(tile: int):
    return lambda x, y, scale: contrastive_loss(x, y, scale, in_batch, COMM, Tiling(tile))


@pytest.mark.parametrize("batch", [2, 3, 7])
def test_loss_matches_the_definition(batch: int) -> None:
    x, y = features(batch)
    loss = contrastive_loss(x, y, torch.tensor(14.0, dtype=torch.float64), in_batch, COMM, Tiling(2))
    assert loss.item() == pytest.approx(by_double_loop(x, y, 14.0), abs=1e-12)


@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
@pytest.mark.parametrize("tile", [1, 2, 3, 5, 12, 1000])
def test_loss_and_gradients_equal_autograd_at_every_tile(tile: int, scale: float) -> None:
    x, y = features(12)
    for ours, theirs in zip(
        loss_and_gradients(kernel(tile), x, y, scale), loss_and_gradients(dense, x, y, scale), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
