"""Data parallelism with DDP: a whole model per rank, gradients averaged in the backward pass (arXiv:2006.15704)."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from clipx.config.lazy_torch import dist, torch
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.distributed.comm import Comm
from clipx.distributed.spec import DistributedSpec, Masters

if TYPE_CHECKING:
    from torch import nn

    from clipx.model.clip import CLIP


class Compression(StrEnum):
    """Compression of the gradients that ranks exchange."""

    none = "none"
    """Gradients are exchanged in their dtype, 16-bit gradients in float32."""

    bf16 = "bf16"
    """Gradients are rounded to bfloat16 (8 bits of mantissa) and averaged: half the bytes of float32."""


_NCCL2 = "TORCH_DIST_USE_NCCL2"


@register("distributed")
@frozen
class DdpSpec(DistributedSpec):
    """Data parallelism with torch's DistributedDataParallel. Each rank holds the whole model; gradients are averaged
    during the backward pass.
    """

    kind: str = "ddp"
    """Name of the option: ddp, data parallelism with torch's DistributedDataParallel."""

    static_graph: bool = option(False, when="data.micro_batches == 1")
    """Lets DDP assume that each step uses the same parameters in the same order and skip the search for unused
    parameters. Requires several ranks; DDP does not support it if the towers run more often than their gradients are
    averaged."""

    bucket_mb: float = option(25.0, gt=0, unit="MiB")
    """Size of a gradient bucket. The gradients of a bucket are averaged in one collective while others
    are still computed. The default is torch's."""

    gradient_as_bucket_view: bool = False
    """Stores gradients as views of the communication buckets, which saves memory of the size of the gradients."""

    compression: Compression = Compression.none
    """Compression of the exchanged gradients. none: their dtype, or float32 if that has 16 bits, since a sum over many
    ranks in 16 bits loses small gradients; bf16: half the bytes of float32, with gradients rounded to 8 bits of
    mantissa."""

    need_ranks: ClassVar[tuple[str, ...]] = (
        *DistributedSpec.need_ranks,
        "static_graph",
        "bucket_mb",
        "gradient_as_bucket_view",
        "compression",
    )
    """Options without effect on one rank, where other values than the defaults are errors."""

    def prepare_group(self, device: torch.device) -> None:
        if self._leaves_nccl2(device):
            os.environ.setdefault(_NCCL2, "0")

    def describe(self, device: torch.device) -> str:
        chosen = self._leaves_nccl2(device) and os.environ.get(_NCCL2) == "0"
        return f"{_NCCL2}=0, with which DDP overlaps the backward pass" if chosen else ""

    def _leaves_nccl2(self, device: torch.device) -> bool:
        """Returns whether torch's new group of NCCL is worse for DDP: its futures wait for the collective, so that the
        backward pass overlaps nothing. Read in torch 2.15.0 (pytorch#192281), the first in which `nccl` is that group.
        """
        nccl = self.backend == "auto" or "nccl" in self.backend.replace(":", ",").split(",")
        return device.type == "cuda" and nccl and torch.__version__.startswith("2.15.")

    def wrap(self, model: CLIP, comm: Comm, masters: Masters | None = None) -> nn.Module:
        """Wraps the model in DDP, so that its backward pass averages the gradients over the ranks. Collective.

        Returns the model itself with one rank or without trainable parameters. All ranks get the weights of rank 0, and
        its masters. With `masters` the averages are in their `.grad`, and those of the model are this rank's.
        """
        if comm.world == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        from torch.nn.parallel import DistributedDataParallel

        from clipx.model.batchnorm import BATCH_NORM

        for master in (masters or {}).values():  # as DDP does with the weights: GPUs of two kinds draw different ones
            dist.broadcast(master.detach(), 0)
        wrapped = DistributedDataParallel(  # no device_ids: with them DDP would move the tokens to the device
            model,
            bucket_cap_mb=self.bucket_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
        # Buffers without BatchNorm are constants, such as the mean of pixels: they are not broadcast before each step.
        wrapped.broadcast_buffers = any(isinstance(module, BATCH_NORM) for module in model.modules())
        narrow = any(p.dtype.itemsize == 2 for p in model.parameters())
        if narrow or self.compression is not Compression.none:
            exchanged = {Compression.none: None, Compression.bf16: torch.bfloat16}[self.compression]
            # DDP compares annotations with classes, and those of this project are strings: hence a lambda.
            wrapped.register_comm_hook(
                masters or {}, lambda masters, bucket: average_bucket(bucket, masters, exchanged)
            )
        return wrapped


def average_bucket(bucket: Any, masters: Masters, exchanged: torch.dtype | None) -> torch.futures.Future[torch.Tensor]:
    """Averages the gradients of a bucket over the ranks in float32, or float64 for float64: a communication hook.

    A parameter with a master gets its average, and what earlier micro-batches added, in the master's `.grad`, which is
    then a view of the sum: no further copy, and no rounding to 16 bits. The bucket itself stays as it is.

    Args:
        bucket: a GradBucket of DDP.
        masters: see `DistributedSpec.wrap`.
        exchanged: dtype in which the sums are exchanged; None: at least float32.
    """
    narrow: torch.Tensor = bucket.buffer()
    wide = narrow.to(torch.promote_types(narrow.dtype, torch.float32), copy=True)
    parameters = bucket.parameters()
    first = narrow.storage_offset()
    for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
        if (master := masters.get(parameter)) is not None:
            # The bucket has the strides of the parameter, e.g. channels_last, which its `gradients()` ignore.
            part = wide.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset() - first)
            if master.grad is not None:
                part += master.grad
            master.grad = part
    wide /= dist.get_world_size()
    sent = wide if exchanged is None else wide.to(exchanged)
    mastered = any(parameter in masters for parameter in parameters)

    def received(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        """Runs on a stream of torch, which protects from reuse the future's value alone: nothing else that the caching
        allocator could give away may be read here. `wide` is in the `.grad` of masters, or not used."""
        (found,) = future.value()
        if not mastered:
            narrow.copy_(found)
        elif found.dtype != wide.dtype:
            wide.copy_(found)
        return narrow

    work: Any = dist.all_reduce(sent, async_op=True)
    reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(received)
    return reduced
