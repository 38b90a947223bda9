"""Formats of the loss's matrix products: error of scores and gradients, and every objective with split products."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.objective_cases import build, score, spec
from torch import Tensor

from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.objective.losses.products import EXACT, SplitProducts
from clipx.objective.spec import TiledSpec

SPLIT = "objective.products=split_fp16"
FLOAT32_SUM = 1e-6  # rounding of a float32 sum of D products with a sum of magnitudes of at most 1


def hard_cases(width: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Unit embeddings whose scores lose most by the split: equal pairs (lo·lo has one sign) and small numbers."""
    generator = torch.Generator().manual_seed(width)
    x, y = (F.normalize(torch.randn(64, width, generator=generator), dim=1) for _ in range(2))
    one = F.normalize(torch.full((64, width), 1 + 2**-11 - 2**-13), dim=1)
    sparse = torch.zeros(64, width)
    sparse[:, 0], sparse[:, 1:] = 1, 2.0**-15 * 1.0003
    return {"random": (x, y), "equal": (x, x), "opposite": (x, -x), "one": (one, one), "sparse": (sparse, one)}


@pytest.mark.parametrize("width", [2, 16, 512, 1024])
@pytest.mark.parametrize("case", ["random", "equal", "opposite", "one", "sparse"])
def test_the_error_of_split_scores_is_within_the_stated_bound(case: str, width: int) -> None:
    x, y = hard_cases(width)[case]
    split = SplitProducts()
    error = (split.scores(split.left(x), split.right(y)).double() - x.double() @ y.double().T).abs().max().item()
    assert error <= 3 * 2**-22 + math.sqrt(width) * 2**-24 + FLOAT32_SUM
    assert 100 * error < 1e-3


def aligned(batch: int, width: int, pull: float) -> tuple[Tensor, Tensor]:
    """Unit embeddings whose pairs match, as in a trained model."""
    generator = torch.Generator().manual_seed(0)
    x = F.normalize(torch.randn(batch, width, generator=generator), dim=1)
    y = F.normalize(x + pull * F.normalize(torch.randn(batch, width, generator=generator), dim=1), dim=1)
    return x, y


@pytest.mark.parametrize("pull", [0.5, 1.5, 100.0])
@pytest.mark.parametrize(("name", "tau"), [("infonce", 0.01), ("dcl", 0.01), ("siglip", 0.01), ("fastclip_v2", 0.03)])
def test_gradients_of_split_products_are_within_a_thousandth_of_float64(name: str, tau: float, pull: float) -> None:
    """Uses the lowest temperature of each objective, pairs that match well and random embeddings."""
    hot = (f"objective.init_temperature={tau}", "objective.tile=48")
    x, y = aligned(200, 64, pull)
    found = score(build(name, *hot, SPLIT, batch=200, samples=200, dtype=torch.float32), x, y, torch.arange(200))
    exact = score(build(name, *hot, batch=200, samples=200), x.double(), y.double(), torch.arange(200))
    torch.testing.assert_close(found.loss.detach().double(), exact.loss.detach(), rtol=1e-4, atol=1e-4)
    for side in ("image", "text"):
        wanted = exact.tensors[side]
        assert (found.tensors[side].double() - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.parametrize(
    ("option", "device", "batch", "split"),
    [
        ("auto", "cpu", 65536, False),
        ("auto", "cuda", 8191, False),
        ("auto", "cuda", 8192, True),
        ("float32", "cuda", 65536, False),
        ("split_fp16", "cpu", 64, True),
    ],
)
def test_auto_splits_products_of_large_batches_on_cuda(option: str, device: str, batch: int, split: bool) -> None:
    comm = Comm(rank=0, world=1, local_rank=0, device=torch.device(device))
    chosen = spec("infonce", f"objective.products={option}")
    assert isinstance(chosen, TiledSpec)
    tiling = chosen.tiling(comm, Length(batch, batch, batch))
    assert isinstance(tiling.products, SplitProducts) is split
    assert (tiling.products is EXACT) is not split
