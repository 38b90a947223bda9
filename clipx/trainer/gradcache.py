"""Forward and backward of one optimizer step, exact for any number of micro-batches (GradCache, arXiv:2101.06983).

The objective receives all embeddings of the step at once, so its loss, gradients and collectives are those of one large
batch. Only the graph of the last micro-batch is stored; the other micro-batches run forward a second time, with the
same random numbers, once the gradients of their embeddings are known. BatchNorm normalizes each micro-batch by its
samples alone: the result is exact for embeddings computed so, not equal to that of one pass over the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipx.data.batch import Batch
from clipx.distributed.comm import Comm
from clipx.model.batchnorm import frozen_statistics
from clipx.model.image_packing import PackedImages
from clipx.objective.base import Metrics, Objective, StepInputs
from clipx.precision.loss_scaler import LossScale
from clipx.precision.spec import Precision
from clipx.trainer.nonfinite import NonFiniteSteps
from clipx.trainer.rng import TorchRng

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def forward_backward(
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    micro_batches: int,
    comm: Comm,
    precision: Precision,
    loss_scale: LossScale | None = None,
    non_finite: NonFiniteSteps | None = None,
) -> tuple[Tensor, Metrics]:
    """Returns the loss (0-dim, global, detached) and metrics of a step. Stores its gradients in `.grad`. Collective.

    Data parallelism averages over the ranks, and each rank holds only its share of the gradient: hence the factor
    `comm.world`. A loss scale multiplies all gradients, including those of the objective. `non_finite` observes the
    model's outputs. Nothing is read by the host.

    Only the model's outputs are differentiated: (image, text), and a captioner's losses. A frozen tower has no graph.
    """
    chunks = list(zip(batch.image_inputs(micro_batches), batch.texts(micro_batches), strict=True))
    embedded: list[tuple[Tensor, ...]] = []
    states: list[TorchRng] = []
    with _no_sync(model, comm, len(chunks) > 1):
        with torch.no_grad(), frozen_statistics(model):
            for chunk in chunks[:-1]:
                states.append(TorchRng.get(comm.device))
                embedded.append(_embed(model, *chunk, precision))
        kept = _embed(model, *chunks[-1], precision)
    after = TorchRng.get(comm.device)
    embedded.append(kept)

    rows = [torch.cat(parts).detach() for parts in zip(*embedded, strict=True)]
    outputs = [x.requires_grad_(last.requires_grad) for x, last in zip(rows, kept, strict=True)]
    image, text, *more = outputs
    loss, metrics = objective(StepInputs(image, text, batch.index, tuple(more), batch.targets, batch.captions))
    whole = loss * comm.world
    (whole if loss_scale is None else loss_scale.scaled(whole)).backward()
    comm.average_gradients(objective)

    sizes = [[len(part) for part in parts] for parts in zip(*embedded, strict=True)]
    learned = [(output, each) for output, each in zip(outputs, sizes, strict=True) if output.requires_grad]
    grads = list(zip(*(_gradient(output).split(each) for output, each in learned), strict=True))
    if grads:
        with _no_sync(model, comm, len(chunks) > 1):
            torch.autograd.backward(_learning(kept), grads[-1])
        del kept, embedded
        for i, (chunk, state) in enumerate(zip(chunks[:-1], states, strict=True)):
            state.set(comm.device)
            with _no_sync(model, comm, i < len(states) - 1):
                torch.autograd.backward(_learning(_embed(model, *chunk, precision)), grads[i])
        after.set(comm.device)
    if non_finite is not None:
        non_finite.observe(outputs)
    return loss.detach(), metrics


def _learning(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [output for output in outputs if output.requires_grad]


def _gradient(output: Tensor) -> Tensor:
    assert output.grad is not None
    return output.grad


def _embed(model: nn.Module, image: Tensor | PackedImages, texts: object, precision: Precision) -> tuple[Tensor, ...]:
    with precision.autocast():
        outputs: tuple[Tensor, ...] = model(image, texts)
    return outputs


def _no_sync(model: nn.Module, comm: Comm, on: bool) -> contextlib.AbstractContextManager[object]:
    """Disables the reduction of the model's gradients, which the last backward of the step performs."""
    if not on or comm.world == 1:
        return contextlib.nullcontext()
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    from torch.distributed.fsdp import FSDPModule

    return _unreduced_gradients(model) if isinstance(model, FSDPModule) else contextlib.nullcontext()


@contextlib.contextmanager
def _unreduced_gradients(model: FSDPModule) -> Iterator[None]:
    """Disables FSDP's reduction: each rank accumulates unsharded gradients."""
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
