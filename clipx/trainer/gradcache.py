"""Forward and backward of one optimizer step, exact for any number of micro-batches (GradCache, arXiv:2101.06983).

The objective receives all embeddings of the step at once, so its loss, gradients and collectives are those of one large
batch. Only the graph of the last micro-batch is stored; the other micro-batches run forward a second time, with the
same random numbers, once the gradients of their embeddings are known. BatchNorm normalizes each micro-batch by its
samples alone: the result is exact for embeddings computed so, not equal to that of one pass over the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipx.data.batch import Batch
from clipx.distributed.comm import Comm
from clipx.model.batchnorm import frozen_statistics
from clipx.objective.base import Metrics, Objective, StepInputs
from clipx.precision.spec import Precision
from clipx.trainer.rng import TorchRng

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

Outputs = tuple[Tensor, ...]
"""Outputs of the model for a micro-batch: embeddings, a captioner's losses, features of the image trunk."""


@dataclass(frozen=True, slots=True)
class GradCache:
    """Forward and backward of a step in micro-batches, whose gradients are those of the whole batch.

    `model`: the model, or its data-parallel wrapper. `scaler`: scales the loss, so all gradients; None: not.
    """

    model: nn.Module
    objective: Objective
    comm: Comm
    precision: Precision
    micro_batches: int = 1
    scaler: torch.amp.GradScaler | None = None
    reads_trunk: bool = False  # the last output of the model is that of `CLIP.returns_trunk`

    def forward_backward(self, batch: Batch) -> tuple[Tensor, Metrics, Tensor]:
        """Adds the gradients of a step to `.grad`, and reads nothing on the host. Collective.

        Only the model's outputs are differentiated. A frozen tower has no graph.

        Returns:
            The loss (0-dim, global, detached), the objective's metrics, and whether the model's outputs on this rank
            are finite (0-dim).
        """
        device = self.comm.device
        inputs = list(zip(batch.image.split(self.micro_batches), batch.text.split(self.micro_batches), strict=True))
        embedded: list[Outputs] = []  # of each micro-batch, without graph but for the last
        states: list[TorchRng] = []  # before each micro-batch but the last
        with self._no_sync(len(inputs) > 1):
            with torch.no_grad(), frozen_statistics(self.model):
                for micro_batch in inputs[:-1]:
                    states.append(TorchRng.get(device))
                    embedded.append(self._embed(*micro_batch))
            embedded.append(self._embed(*inputs[-1]))
        after = TorchRng.get(device)

        outputs = _leaves(embedded)
        loss, metrics = self._backward_to(outputs, batch)
        gradients = _split_gradients(outputs, embedded)
        if gradients[-1]:
            kept = _with_graph(embedded[-1])
            embedded.clear()  # their memory is free for the second pass
            with self._no_sync(len(inputs) > 1):
                torch.autograd.backward(kept, gradients[-1])
            del kept
            for i, state in enumerate(states):
                state.set(device)
                with self._no_sync(i < len(states) - 1):
                    torch.autograd.backward(_with_graph(self._embed(*inputs[i])), gradients[i])
            after.set(device)
        return loss.detach(), metrics, torch.stack([output.detach().isfinite().all() for output in outputs]).all()

    def _embed(self, image: Any, texts: Any) -> Outputs:
        with self.precision.autocast():
            outputs: Outputs = self.model(image, texts)
        return outputs

    def _backward_to(self, outputs: Sequence[Tensor], batch: Batch) -> tuple[Tensor, Metrics]:
        """Computes the loss, its gradients with respect to the outputs, and those of the objective's parameters.

        Data parallelism averages the model's gradients over the ranks, and each rank holds only its share of the
        gradient: hence the factor `comm.world`.
        """
        image, text, *more = outputs
        inputs = StepInputs(
            image,
            text,
            batch.index,
            targets=batch.targets,
            captions=batch.text.digests,
            tokens=batch.text.rows[0],
            trunk=more.pop() if self.reads_trunk else None,
            outputs=tuple(more),
        )
        loss, metrics = self.objective(inputs)
        whole = loss * self.comm.world
        (whole if self.scaler is None else self.scaler.scale(whole)).backward()
        self.comm.average_gradients(self.objective)
        return loss, metrics

    def _no_sync(self, on: bool) -> contextlib.AbstractContextManager[object]:
        """Disables the reduction of the model's gradients, which the last backward of the step performs."""
        model = self.model
        if not on or self.comm.world == 1:
            return contextlib.nullcontext()
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        from torch.distributed.fsdp import FSDPModule

        return _unreduced_gradients(model) if isinstance(model, FSDPModule) else contextlib.nullcontext()


def _leaves(embedded: Sequence[Outputs]) -> list[Tensor]:
    """Joins the outputs of the micro-batches. The joined ones are leaves, at which the backward of the loss ends."""
    leaves = []
    for parts in zip(*embedded, strict=True):  # one output in each micro-batch
        leaf = torch.cat(parts).detach()
        leaf.requires_grad_(parts[-1].requires_grad)  # only the last micro-batch has a graph
        leaves.append(leaf)
    return leaves


def _split_gradients(outputs: Sequence[Tensor], embedded: Sequence[Outputs]) -> list[list[Tensor]]:
    """Returns the gradients of each micro-batch's outputs, without those of a frozen tower."""
    gradients: list[list[Tensor]] = [[] for _ in embedded]
    for output, parts in zip(outputs, zip(*embedded, strict=True), strict=True):
        if not output.requires_grad:
            continue
        assert output.grad is not None
        sizes = [len(part) for part in parts]
        for of_micro_batch, gradient in zip(gradients, output.grad.split(sizes), strict=True):
            of_micro_batch.append(gradient)
    return gradients


def _with_graph(outputs: Outputs) -> list[Tensor]:
    return [output for output in outputs if output.requires_grad]


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
