"""Forward and backward of one optimizer step, exact for any number of micro-batches (GradCache, arXiv:2101.06983).

The objective sees all embeddings of the step at once, so its loss, its gradients and its collectives are those of one
large batch. Only the last micro-batch's graph is kept; the others run a second time, with the same random numbers,
when their embeddings' gradients are known.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from clipx.data.loader import Batch
from clipx.distributed import Comm
from clipx.errors import ClipxError
from clipx.objective.base import Metrics, Objective
from clipx.precision import Precision
from clipx.rng import TorchRng


class NotFiniteError(ClipxError):
    """Raised on all ranks, before anything but gradients has changed."""


def forward_backward(
    model: nn.Module, objective: Objective, batch: Batch, micro_batches: int, comm: Comm, precision: Precision
) -> tuple[Tensor, Metrics]:
    """The loss (0-dim, global, detached) and metrics of a step; gradients of the global loss are left in `.grad`.

    Data parallelism averages over the ranks, and each rank holds only its share of the gradient: hence the factor
    `comm.world`. Raises NotFiniteError, on all ranks, where the loss is infinite or NaN; it names
    the ranks whose embeddings are.
    """
    chunks = list(zip(batch.image.chunk(micro_batches), batch.tokens.chunk(micro_batches), strict=True))
    embedded: list[tuple[Tensor, Tensor]] = []
    states: list[TorchRng] = []
    with _no_sync(model, len(chunks) > 1):
        with torch.no_grad(), _frozen_statistics(model):
            for image, tokens in chunks[:-1]:
                states.append(TorchRng.get(comm.device))
                embedded.append(_embed(model, image, tokens, precision))
        kept = _embed(model, *chunks[-1], precision)
    after = TorchRng.get(comm.device)
    embedded.append(kept)

    image_bD, text_bD = (torch.cat(side).detach().requires_grad_() for side in zip(*embedded, strict=True))
    loss, metrics = objective(image_bD, text_bD, batch.index)
    (loss * comm.world).backward()
    comm.average_gradients(objective)

    assert image_bD.grad is not None
    assert text_bD.grad is not None
    sizes = [len(image) for image, _ in chunks]
    grads = list(zip(image_bD.grad.split(sizes), text_bD.grad.split(sizes), strict=True))
    with _no_sync(model, len(chunks) > 1):
        torch.autograd.backward(kept, grads[-1])
    del kept, embedded
    for i, (chunk, state) in enumerate(zip(chunks[:-1], states, strict=True)):
        state.set(comm.device)
        with _no_sync(model, i < len(states) - 1):
            torch.autograd.backward(_embed(model, *chunk, precision), grads[i])
    after.set(comm.device)
    _check_finite(loss, image_bD, text_bD, comm)  # last: the host waits here for what it has launched
    return loss.detach(), metrics


def _check_finite(loss: Tensor, image_bD: Tensor, text_bD: Tensor, comm: Comm) -> None:
    """Every rank has the loss whole; where it is not finite, they find out whose embeddings are not."""
    if math.isfinite(loss.item()):
        return
    here = image_bD.isfinite().all() & text_bD.isfinite().all()
    ranks = [str(rank) for rank, finite in enumerate(comm.gather(here.float()[None]).tolist()) if not finite]
    what = f"the embeddings of rank {', '.join(ranks)} are" if ranks else "the loss is"
    raise NotFiniteError(f"{what} not finite")


def _embed(model: nn.Module, image: Tensor, tokens: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    with precision.autocast():
        image_mD, text_mD = model(image, tokens)
    return image_mD, text_mD


def _no_sync(model: nn.Module, on: bool) -> contextlib.AbstractContextManager[object]:
    """Holds back the reduction of the model's gradients, which the step's last backward does."""
    if on and isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _frozen_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm normalises by the batch as ever, but its running statistics wait for the second forward."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    saved = [(m.momentum, m.num_batches_tracked) for m in norms]
    for m in norms:
        m.momentum, m.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for m, (momentum, tracked) in zip(norms, saved, strict=True):
            m.momentum, m.num_batches_tracked = momentum, tracked
