"""Sharded data parallelism with FSDP2: a shard of weights, gradients and optimizer state per rank (arXiv:2304.11277).

A block's weights are gathered when it computes. Batches, losses and resulting weights are the same as with DDP.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import dist, torch
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.distributed.comm import Comm
from clipx.distributed.consistency import digest, format_ranks, format_ranks_with_hosts
from clipx.distributed.launch_env import node_name
from clipx.distributed.spec import DistributedSpec
from clipx.errors import require, require_effect

if TYPE_CHECKING:
    from clipx.model.clip import CLIP


class FsdpDtype(StrEnum):
    """Dtype of gathered weights or of reduced gradients."""

    own = "own"
    """The dtype of the weights; for param_dtype bfloat16 where precision computes in bfloat16 by autocast."""

    float32 = "float32"
    """32-bit floating point."""

    bfloat16 = "bfloat16"
    """16-bit floating point with 8 bits of mantissa: half the bytes of float32."""

    def dtype(self) -> torch.dtype | None:
        """Returns the torch dtype, or None for the dtype of the weights."""
        return {"own": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[self]


@register("distributed")
@frozen
class FsdpSpec(DistributedSpec):
    """Sharded data parallelism with torch's fully_shard. Each rank holds a shard of the weights, the gradients and the
    optimizer's state; each block is one sharding unit, then the rest of each tower.
    """

    kind: str = "fsdp"
    """Name of the option: fsdp, sharded data parallelism with torch's fully_shard (FSDP2)."""

    shard_size: int | None = option(None, ge=2, hint="null shares one copy among all ranks")
    """Number of ranks that share one copy of the model, such as the ranks of a node (hybrid sharding): a divisor of the
    number of ranks. Each further group holds another copy, and only gradients are exchanged between groups. null: all
    ranks share one copy."""

    reshard_after_forward: bool = True
    """Frees the gathered weights of a block after its forward pass and gathers them again for its backward pass. false
    keeps them until the backward pass: more memory, less traffic."""

    cpu_offload: bool = False
    """Stores each rank's shards of weights, gradients and optimizer state in host memory, where the optimizer then also
    runs. An error with device=cpu."""

    param_dtype: FsdpDtype = FsdpDtype.own
    """Dtype of the gathered weights, in which blocks compute. own: bfloat16 with precision=amp_bf16 and float8, which
    round the factors of products anyway, else the dtype of the weights; float32: under autocast each linear layer then
    stores its rounded weights until the backward pass; bfloat16. Another dtype than the weights' needs autocast:
    precision=amp_bf16, amp_fp16 or float8."""

    reduce_dtype: FsdpDtype = FsdpDtype.own
    """Dtype in which gradients are summed over the ranks. own: the dtype of the weights, and float32 if that has 16
    bits, whatever param_dtype is; float32; bfloat16."""

    shards_parameters: ClassVar[bool] = True
    """A rank holds only a shard of each parameter and of the optimizer's state."""

    need_ranks: ClassVar[tuple[str, ...]] = (
        *DistributedSpec.need_ranks,
        "reshard_after_forward",
        "cpu_offload",
        "param_dtype",
        "reduce_dtype",
    )
    """Options without effect on one rank, where other values than the defaults are errors."""

    def check_precision(self, kind: str, weight_format: str | None, autocasts: bool) -> None:
        require(
            autocasts or self.param_dtype in (FsdpDtype.own, weight_format),
            f"distributed.param_dtype={self.param_dtype} with precision={kind} gives a layer inputs and weights of "
            "different dtypes: use precision=amp_bf16, or remove distributed.param_dtype",
        )

    def gathered_dtype(self, weights: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
        """Returns the dtype of the gathered weights. `weights`: dtype of the weights; `autocast`: see `prepare`."""
        narrow = autocast if autocast is torch.bfloat16 else weights
        return self.param_dtype.dtype() or narrow

    def prepare(self, model: CLIP, comm: Comm, autocast: torch.dtype | None = None) -> None:
        """Shards the model in place. Raises ConfigError for options that do not fit the ranks. Collective."""
        DistributedSpec.prepare(self, model, comm, autocast)
        require(
            self.shard_size is None or comm.world % self.shard_size == 0,
            f"distributed.shard_size={self.shard_size} does not divide the {comm.world} ranks: choose from "
            f"{', '.join(str(n) for n in range(2, comm.world + 1) if comm.world % n == 0) or 'null'}",
        )
        require_effect(not self.cpu_offload or comm.device.type != "cpu", "distributed.cpu_offload=true", "on the CPU")
        if not dist.is_initialized():  # one rank, unless a caller opened a process group for it
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        from clipx.model.layers import named_blocks

        size = self.shard_size or comm.world
        hybrid = size < comm.world
        mesh = init_device_mesh(
            comm.device.type,
            (comm.world // size, size) if hybrid else (comm.world,),
            mesh_dim_names=("copies", "parts") if hybrid else ("parts",),
        )
        # Without a reduce_dtype FSDP would sum the gradients in the dtype of the gathered weights.
        weights = next(model.parameters()).dtype
        precision = MixedPrecisionPolicy(
            param_dtype=self.gathered_dtype(weights, autocast),
            reduce_dtype=self.reduce_dtype.dtype() or torch.promote_types(weights, torch.float32),
            cast_forward_inputs=False,
        )
        model.to(memory_format=torch.contiguous_format)  # fully_shard accepts contiguous parameters only
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
        if hybrid:
            _require_equal_copies(model, size, comm)


def _require_equal_copies(model: CLIP, size: int, comm: Comm) -> None:
    """Compares the shards of each copy of the model, of `size` ranks, with those of the first. FSDP does not, and the
    random numbers of CUDA depend on the number of multiprocessors. Raises ConfigError. Collective."""
    shards = [p.to_local() for p in model.parameters()]  # type: ignore[attr-defined]
    hashes = [torch.hash_tensor(shard.cpu()).item() for shard in shards if shard.numel()]
    hosts, found = zip(*comm.gather_objects((node_name(), digest(hashes))), strict=True)
    others = [rank for rank in range(comm.world) if found[rank] != found[rank % size]]
    require(
        not others,
        f"distributed.shard_size={size}: the initial weights of {format_ranks_with_hosts(others, hosts)} differ from "
        f"those of {format_ranks(range(size))}, so that the copies would stay different models: use GPUs of one kind, "
        "which draw the same random numbers, or remove distributed.shard_size",
    )
