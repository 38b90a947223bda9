"""Matrix products and kernels of the contrastive loss on a CUDA device, compared with float64 on the host."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import needs_cuda
from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.objective.losses.contrastive import Normaliser, Tiling, contrastive_loss, in_batch, negatives_only
from clipx.objective.losses.products import EXACT, Products, SplitProducts, full_precision

pytestmark = [pytest.mark.gpu, needs_cuda]

SPLIT_ERROR, FLOAT32_SUM = 2.1e-6, 2e-6  # of scores of width 512: the bound in `products`; a sum of float32 products


def fused() -> Products:
    pytest.importorskip("triton")
    from clipx.objective.losses.fused import FusedProducts

    return FusedProducts()


def embeddings(batch: int, width: int = 512, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns embeddings and their partners at a distance of `noise`: with 1 the loss of a batch is almost 0."""
    generator = torch.Generator().manual_seed(0)
    x = F.normalize(torch.randn(batch, width, generator=generator), dim=1)
    return x, F.normalize(x + noise * F.normalize(torch.randn(batch, width, generator=generator), dim=1), dim=1)


def step(x: Tensor, y: Tensor, products: Products, normaliser: Normaliser, tile: int) -> list[Tensor]:
    comm = Comm(rank=0, world=1, local_rank=0, device=x.device)
    leaves = [x.requires_grad_(), y.requires_grad_(), torch.tensor(100.0, dtype=x.dtype, device=x.device)]
    leaves[2].requires_grad_()
    loss = contrastive_loss(leaves[0], leaves[1], leaves[2], normaliser, comm, Tiling(tile, products))
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def test_split_scores_are_within_the_stated_bound() -> None:
    x, y = embeddings(1000)
    split = SplitProducts()
    with full_precision("cuda"):
        for left, right in ((x, y), (x, x)):  # equal embeddings lose most
            s = split.scores(split.left(left.cuda()), split.right(right.cuda()))
            error = (s.cpu().double() - left.double() @ right.double().T).abs().max().item()
            assert error <= SPLIT_ERROR + FLOAT32_SUM
            assert 100 * error < 1e-3


@pytest.mark.parametrize("normaliser", [in_batch, negatives_only])
@pytest.mark.parametrize(
    ("build", "most"), [(lambda: EXACT, 1e-4), (SplitProducts, 2e-3), (fused, 2e-3)], ids=["float32", "split", "fused"]
)
def test_loss_and_gradients_are_close_to_float64(build: type[Products], most: float, normaliser: Normaliser) -> None:
    """Uses odd sizes and several tiles. A device may truncate to TF32, which doubles the error of rounding."""
    x, y = embeddings(1001)
    found = step(x.cuda(), y.cuda(), build(), normaliser, 300)
    exact = step(x.double(), y.double(), EXACT, normaliser, 300)
    assert (found[0].cpu() - exact[0]).abs() < 1e-4
    for gradient, wanted in zip(found[1:3], exact[1:3], strict=True):
        assert (gradient.cpu().double() - wanted).norm() < most * wanted.norm()
    torch.testing.assert_close(found[3].cpu().double(), exact[3], rtol=10 * most, atol=0)


def test_fused_kernels_agree_with_split_products_at_a_large_batch() -> None:
    x, y = (t.cuda() for t in embeddings(8192, noise=6.0))
    for one, other in zip(
        step(x, y, fused(), in_batch, 4096), step(x, y, SplitProducts(), in_batch, 4096), strict=True
    ):
        assert other.norm() > 0
        assert (one - other).norm() < 1e-4 * other.norm()


@pytest.mark.parametrize("build", [lambda: EXACT, SplitProducts, fused], ids=["float32", "split", "fused"])
def test_the_host_never_waits_for_the_device(build: type[Products]) -> None:
    x, y = (t.cuda() for t in embeddings(512))
    products = build()
    step(x, y, products, in_batch, 200)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        scale = torch.full((), 100.0, device="cuda", requires_grad=True)
        comm = Comm(rank=0, world=1, local_rank=0, device=x.device)
        contrastive_loss(x, y, scale, in_batch, comm, Tiling(200, products)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
