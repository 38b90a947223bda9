"""Each rank keeps a part of the weights, the gradients and the optimizer's state (FSDP2, arXiv:2304.11277).

A block's weights are gathered when it computes. Everything else is as under DDP: the same batches, losses, weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import option
from clipx.distributed.comm import Comm
from clipx.distributed.spec import DistributedSpec
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.model.clip import CLIP


class FsdpDtype(StrEnum):
    """The dtype of gathered weights, or of reduced gradients. own: the weights'."""

    own = "own"
    float32 = "float32"
    bfloat16 = "bfloat16"

    def dtype(self) -> torch.dtype | None:
        return {"own": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[self]


@option("distributed")
@dataclass(kw_only=True, slots=True)
class FsdpSpec(DistributedSpec):
    """Sharding with torch's fully_shard: block by block, then each tower's rest."""

    kind: str = "fsdp"
    # Ranks that share one copy of the model, such as those of a node; other such groups hold copies of their own, and
    # only gradients travel between them. null: all ranks share one.
    shard_size: int | None = None
    reshard_after_forward: bool = True  # false: a block's weights stay for its backward pass: more memory, less traffic
    cpu_offload: bool = False  # what a rank keeps waits in the host's memory, where the optimizer works too
    param_dtype: FsdpDtype = FsdpDtype.own  # what blocks compute with; bfloat16 halves what is gathered
    reduce_dtype: FsdpDtype = FsdpDtype.own  # what gradients are summed in
    shards_parameters: ClassVar[bool] = True

    def __post_init__(self) -> None:
        DistributedSpec.__post_init__(self)
        require(
            self.shard_size is None or self.shard_size >= 2,
            f"distributed.shard_size={self.shard_size} must be at least 2, or null for all ranks: one rank that keeps "
            "all is distributed=ddp",
        )

    def check_optimizer(self, kind: str, shardable: bool) -> None:
        require(
            shardable,
            f"optimizer={kind} needs each matrix whole, of which distributed={self.kind} leaves a rank a part: use "
            "optimizer=adamw, or distributed=ddp",
        )

    def prepare(self, model: CLIP, comm: Comm) -> None:
        """Shards the model in place. Raises ConfigError where the ranks cannot be grouped so."""
        DistributedSpec.prepare(self, model, comm)
        require(
            self.shard_size is None or comm.world % self.shard_size == 0,
            f"distributed.shard_size={self.shard_size} does not divide the {comm.world} ranks: give one of "
            f"{', '.join(str(n) for n in range(2, comm.world + 1) if comm.world % n == 0) or 'null'}",
        )
        require(
            not self.cpu_offload or comm.device.type != "cpu",
            "distributed.cpu_offload=true has no effect on the CPU: leave it out",
        )
        if comm.world == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        from clipx.model.blocks import named_blocks

        size = self.shard_size or comm.world
        hybrid = size < comm.world
        mesh = init_device_mesh(
            comm.device.type,
            (comm.world // size, size) if hybrid else (comm.world,),
            mesh_dim_names=("copies", "parts") if hybrid else ("parts",),
        )
        precision = MixedPrecisionPolicy(
            param_dtype=self.param_dtype.dtype(), reduce_dtype=self.reduce_dtype.dtype(), cast_forward_inputs=False
        )
        model.to(memory_format=torch.contiguous_format)  # it shards no others
        offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        for module in (*named_blocks(model).values(), *model.children(), model):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=self.reshard_after_forward,
                mp_policy=precision,
                offload_policy=offload,
            )
        for method in ("encode_image", "encode_text"):
            register_fsdp_forward_method(model, method)
