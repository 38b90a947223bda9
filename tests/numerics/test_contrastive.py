"""The contrastive kernel against its definition, the softmax, and open_clip's loss."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss
from torch import Tensor

from clipx.distributed import Comm
from clipx.objective.contrastive import Contrastive, contrastive_loss, in_batch
from clipx.objective.temperature import GlobalTemperature

COMM = Comm(rank=0, world=1, local_rank=0, device=torch.device("cpu"))


def features(batch: int, width: int = 16, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (F.normalize(torch.randn(batch, width, generator=generator, dtype=dtype), dim=-1) for _ in range(2))
    return x.requires_grad_(), y.requires_grad_()


def by_double_loop(x: Tensor, y: Tensor, scale: float) -> float:
    """Mean over images and texts of -log softmax of the right pair."""
    total = 0.0
    n = len(x)
    for i in range(n):
        for a, b in ((x, y), (y, x)):
            z = [scale * torch.dot(a[i], b[j]).item() for j in range(n)]
            total += math.log(sum(math.exp(v) for v in z)) - z[i]
    return total / (2 * n)


def dense(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """The same by cross_entropy over the full matrix, for autograd."""
    logits, labels = scale * x @ y.T, torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def loss_and_gradients(function, x: Tensor, y: Tensor, scale: float) -> list[Tensor]:
    alpha = torch.tensor(scale, dtype=x.dtype, requires_grad=True)
    loss = function(x, y, alpha)
    return [loss, *torch.autograd.grad(loss, (x, y, alpha))]


def kernel(tile: int):
    return lambda x, y, scale: contrastive_loss(x, y, scale, in_batch, COMM, tile)


@pytest.mark.parametrize("batch", [2, 3, 7])
def test_loss_is_the_definition(batch: int) -> None:
    x, y = features(batch)
    loss = contrastive_loss(x, y, torch.tensor(14.0, dtype=torch.float64), in_batch, COMM, tile=2)
    assert loss.item() == pytest.approx(by_double_loop(x, y, 14.0), abs=1e-12)


@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
@pytest.mark.parametrize("tile", [1, 2, 3, 5, 12, 1000])
def test_loss_and_gradients_are_autograds_whatever_the_tile(tile: int, scale: float) -> None:
    x, y = features(12)
    for ours, theirs in zip(
        loss_and_gradients(kernel(tile), x, y, scale), loss_and_gradients(dense, x, y, scale), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [14.3, 100.0])
def test_equals_open_clips_loss_in_float32(scale: float) -> None:
    x, y = features(64, dtype=torch.float32)
    ours = loss_and_gradients(kernel(17), x, y, scale)
    theirs = loss_and_gradients(lambda a, b, s: ClipLoss()(a, b, s), x, y, scale)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=7e-8 * scale)  # float32 keeps logits to 2^-24 of the scale


def test_order_of_the_batch_does_not_matter() -> None:
    x, y = features(9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    straight = loss_and_gradients(kernel(4), x, y, 14.0)
    shuffled = loss_and_gradients(
        kernel(4), x.detach()[order].requires_grad_(), y.detach()[order].requires_grad_(), 14.0
    )
    torch.testing.assert_close(shuffled[0], straight[0])
    torch.testing.assert_close(shuffled[1], straight[1][order])
    torch.testing.assert_close(shuffled[2], straight[2][order])


def test_equal_pairs_in_a_batch_are_negatives_of_each_other() -> None:
    x, y = features(4)
    x2, y2 = (torch.cat([t.detach(), t.detach()]).requires_grad_() for t in (x, y))
    for ours, theirs in zip(
        loss_and_gradients(kernel(3), x2, y2, 20.0), loss_and_gradients(dense, x2, y2, 20.0), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_stays_finite_at_the_lowest_temperature_with_the_worst_features(sign: int) -> None:
    """All logits +100 or -100, the pair's own the opposite."""
    x = F.normalize(torch.ones(6, 8), dim=-1).bfloat16().requires_grad_()
    y = (sign * F.normalize(torch.ones(6, 8), dim=-1)).bfloat16()
    y[0] = -y[0]
    y.requires_grad_()
    for value in loss_and_gradients(kernel(4), x, y, 100.0):
        assert value.isfinite().all()


def test_autocast_does_not_reach_the_loss() -> None:
    x, y = features(32, dtype=torch.float32)
    plain = contrastive_loss(x, y, torch.tensor(100.0), in_batch, COMM, tile=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = contrastive_loss(x, y, torch.tensor(100.0), in_batch, COMM, tile=8)
    assert under.dtype == torch.float32
    assert under.item() == plain.item()


def test_nothing_of_the_size_of_the_pairs_is_kept_for_backward() -> None:
    x, y = features(50, width=4)
    loss = contrastive_loss(x, y, torch.tensor(10.0, dtype=torch.float64), in_batch, COMM, tile=8)
    assert sorted(tuple(t.shape) for t in loss.grad_fn.saved_tensors) == [(), (50, 4), (50, 4)]


def test_the_temperature_starts_at_its_value_and_is_clamped() -> None:
    objective = Contrastive(COMM, GlobalTemperature(0.07, 100.0), in_batch, tile=8)
    x, y = features(8, dtype=torch.float32)
    _, metrics = objective(x, y, torch.arange(8))
    assert metrics["temperature"].item() == pytest.approx(0.07)
    for value, clamped in ((9.0, math.log(100)), (-3.0, 0.0)):
        objective.temperature.log_scale.data.fill_(value)
        objective.after_step(0)
        assert objective.temperature.log_scale.item() == pytest.approx(clamped)
