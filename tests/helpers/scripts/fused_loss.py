"""Losses of Triton's interpreter on several ranks, compared with dense float64 losses differentiated by autograd.

    fused_loss.py OUT

Run by torchrun with TRITON_INTERPRET=1, which triton reads when it is imported. Rank 0 writes `OUT`, a JSON object: the
largest error on any rank of each quantity, by case.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from clipx.distributed.spec import DistributedSpec
from clipx.objective.losses.contrastive import Normaliser, Tiling, contrastive_loss, in_batch, negatives_only
from clipx.objective.losses.fcco import MovingAverage
from clipx.objective.losses.products import SplitProducts

EPS = 0.05
CASES = {  # samples on all ranks, width, tile
    "a tile with one block": (12, 24, 4096),
    "several blocks, odd sizes": (141, 70, 4096),
    "several tiles, odd sizes": (282, 24, 135),
}


def normalisers(own: int) -> dict[str, Normaliser]:
    unseen = torch.full((own, 2), torch.nan)
    return {"infonce": in_batch, "dcl": negatives_only, "moving average": MovingAverage(unseen, 1.0, EPS)}


def infonce(z: Tensor) -> Tensor:
    return z.logsumexp(1) - z.diagonal()


def dcl(z: Tensor) -> Tensor:
    return z.masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf).logsumexp(1) - z.diagonal()


def moving_average(z: Tensor) -> Tensor:
    """Returns log(ε + g) of samples that were never seen."""
    return (EPS + dcl(z).exp() / (len(z) - 1)).log()


DENSE: dict[str, Callable[[Tensor], Tensor]] = {"infonce": infonce, "dcl": dcl, "moving average": moving_average}


def embeddings(batch: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    x = F.normalize(torch.randn(batch, width, generator=generator), dim=1)
    return x, F.normalize(x + F.normalize(torch.randn(batch, width, generator=generator), dim=1), dim=1)


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def lse_error(products: SplitProducts, diagonal: int) -> float:
    """Returns the largest error of the log-sum-exp of a tile that pairs i + diagonal = j cross."""
    x_BD, y_BD = embeddings(140, 24)
    z = 50 * x_BD @ y_BD[:133].T
    z.diagonal(diagonal).fill_(-torch.inf)
    found = products.lse(products.left(x_BD), products.right(y_BD)[:133], torch.tensor(50.0), diagonal)
    return max((lse - z.logsumexp(dim)).abs().max().item() for lse, dim in zip(found, (1, 0), strict=True))


def main(out: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("triton") and not name.startswith("triton._C")]:
        del sys.modules[name]  # a fork may have it from before the interpreter was chosen
    from clipx.objective.losses.fused import FusedProducts  # the tests import this module without the interpreter

    comm = DistributedSpec().build()
    errors: dict[str, dict[str, float]] = {}
    for case, (batch, width, tile) in CASES.items():
        x_BD, y_BD = embeddings(batch, width)
        own = slice(comm.rank * batch // comm.world, (comm.rank + 1) * batch // comm.world)
        for name, normaliser in normalisers(own.stop - own.start).items():
            x, y = (t[own].clone().requires_grad_() for t in (x_BD, y_BD))
            alpha = torch.tensor(50.0, requires_grad=True)
            loss = contrastive_loss(x, y, alpha, normaliser, comm, Tiling(tile, FusedProducts()))
            loss.backward()
            exact = [t.double().requires_grad_() for t in (x_BD, y_BD, alpha.detach())]
            z = exact[2] * exact[0] @ exact[1].T
            dense = (DENSE[name](z).mean() + DENSE[name](z.T).mean()) / 2
            dx, dy, dalpha = torch.autograd.grad(dense, exact)
            assert x.grad is not None and y.grad is not None and alpha.grad is not None
            found = {
                "loss": (loss.detach() - dense.detach()).abs().item(),
                "image": relative(x.grad, dx[own]),
                "text": relative(y.grad, dy[own]),
                "scale": relative(comm.sum(alpha.grad), dalpha),
            }
            assert all(math.isfinite(error) for error in found.values()), found
            worst = comm.gather(torch.tensor([list(found.values())], dtype=torch.float64)).amax(0).tolist()
            errors[f"{case}, {name}"] = dict(zip(found, worst, strict=True))
    errors["a tile off the diagonal"] = {"lse": max(lse_error(FusedProducts(), diagonal) for diagonal in (-5, 7))}
    if comm.is_main:
        out.write_text(json.dumps(errors))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
