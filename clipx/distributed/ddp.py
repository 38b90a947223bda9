"""Each rank holds the whole model; gradients are averaged during the backward pass (DDP, arXiv:2006.15704)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from clipx.config.registry import option
from clipx.distributed.comm import Comm
from clipx.distributed.spec import DistributedSpec
from clipx.errors import require

if TYPE_CHECKING:
    from torch import nn

    from clipx.model.clip import CLIP


class Compression(StrEnum):
    """Of the gradients that ranks exchange."""

    none = "none"
    bf16 = "bf16"


@option("distributed")
@dataclass(kw_only=True, slots=True)
class DdpSpec(DistributedSpec):
    """Data parallelism with torch's DistributedDataParallel."""

    kind: str = "ddp"
    # The same parameters are used in the same order in each step, which lets DDP skip looking for them.
    static_graph: bool = False
    bucket_mb: float = 25.0  # MiB of gradients that are averaged together, while others are still computed
    gradient_as_bucket_view: bool = False  # gradients lie in the buckets: saves their size in memory
    compression: Compression = Compression.none  # bf16: half the bytes, and gradients rounded to 8 bits of mantissa

    def __post_init__(self) -> None:
        DistributedSpec.__post_init__(self)
        require(self.bucket_mb > 0, f"distributed.bucket_mb={self.bucket_mb:g} must be above 0 MiB: 25 is torch's own")

    def check_micro_batches(self, micro_batches: int) -> None:
        require(
            not self.static_graph or micro_batches == 1,
            f"distributed.static_graph=true does not go with data.micro_batches={micro_batches}, which runs the towers "
            "more often than their gradients are averaged: leave one of them out",
        )

    def wrap(self, model: CLIP, comm: Comm) -> nn.Module:
        """The model, whose backward pass averages the gradients over the ranks."""
        if comm.world == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        from torch.nn.parallel import DistributedDataParallel

        from clipx.model.batchnorm import BATCH_NORM

        if not any(isinstance(module, BATCH_NORM) for module in model.modules()):
            # The pixels' mean and deviation, which it would broadcast before each step.
            constants = [name for name, _ in model.named_buffers()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constants)
        wrapped = DistributedDataParallel(  # without device_ids, by which it would move the tokens
            model,
            bucket_cap_mb=self.bucket_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
        if self.compression is Compression.bf16:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped
