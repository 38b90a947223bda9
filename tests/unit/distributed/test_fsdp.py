"""Weights and buffers of several ranks: gathered and copied by FSDP, and by DDP. Sums: integration/test_reduction.py."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.fsdp  # once, before the processes fork
from helpers.collectives import Collectives
from helpers.runs import VIT, compose
from helpers.savers import run_in_processes
from torch import Tensor, nn

from clipx.distributed.comm import Comm
from clipx.distributed.ddp import DdpSpec
from clipx.errors import ConfigError
from clipx.model.layers import named_blocks
from clipx.optimizer.master import MasterWeights

FSDP = (*VIT, "precision=amp_bf16", "distributed=fsdp")


def kept_weights(comm: Comm, *words: str) -> tuple[int, int]:
    """Returns the bytes of matrices of blocks that are stored for the backward pass, after a forward pass of the towers,
    and the number of these matrices."""
    spec = compose(*FSDP, *words)
    precision = spec.precision.build(comm.device)
    torch.manual_seed(0)
    model = spec.model.build(comm.device, precision.stored)
    shapes = {p.shape for block in named_blocks(model).values() for p in block.parameters() if p.ndim == 2}
    shapes |= {shape[::-1] for shape in shapes}
    spec.distributed.prepare(model, comm, precision.autocast_dtype)
    saved = list[Tensor]()

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    size = spec.model.image.size
    image, tokens = torch.zeros(7, 3, size, size, dtype=torch.uint8), torch.randint(1, 400, (7, 20))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), precision.autocast():
        features = model.encode_image(image), model.encode_text(tokens)
    assert all(x.requires_grad for x in features)  # a fork may not run backward: the parent may have autograd's threads
    matrices = [x for x in saved if x.shape in shapes and x.dtype is torch.bfloat16]
    return sum({id(x.untyped_storage()): x.untyped_storage().nbytes() for x in matrices}.values()), len(matrices)


def prepared(comm: Comm, seeds: tuple[int, int]) -> str:
    """Shards a model in two copies of two ranks, drawn with a seed for each copy. Returns the error, if any."""
    spec = compose(*FSDP, "distributed.shard_size=2")
    torch.manual_seed(seeds[comm.rank // 2])
    model = spec.model.build(comm.device, torch.float32)
    try:
        spec.distributed.prepare(model, comm)
    except ConfigError as error:
        return str(error)
    return ""


def prepared_twice(comm: Comm) -> tuple[str, str]:
    return prepared(comm, (0, 0)), prepared(comm, (0, 1))


def kept_by_type(comm: Comm) -> tuple[tuple[int, int], tuple[int, int]]:
    return kept_weights(comm), kept_weights(comm, "distributed.param_dtype=float32")


def test_blocks_keep_no_rounded_weights_under_autocast(tmp_path: Path) -> None:
    """Those of float32 are rounded by autocast, and kept."""
    for (kept, matrices), (of_float32, _) in run_in_processes(2, tmp_path, kept_by_type):
        assert (kept, matrices > 0, of_float32 > 0) == (0, True, True)


def test_copies_of_the_model_have_the_same_weights(tmp_path: Path) -> None:
    for alike, different in run_in_processes(4, tmp_path, prepared_twice):
        assert alike == ""
        assert different.startswith("distributed.shard_size=2: the initial weights of ranks 2-3 (host")
        assert "differ from those of ranks 0-1" in different


def wrapped(comm: Comm) -> list[list[float]]:
    """Wraps a model with other weights on each rank. Returns its weights in bfloat16, and their masters."""
    torch.manual_seed(comm.rank)
    masters = MasterWeights(nn.Linear(3, 4), torch.bfloat16)
    DdpSpec().wrap(masters.model, comm, masters.by_parameter)  # type: ignore[arg-type]
    return [x.detach().flatten().tolist() for pair in masters.by_parameter.items() for x in pair]


def test_all_ranks_begin_with_the_masters_of_rank_0(tmp_path: Path) -> None:
    first, second = run_in_processes(2, tmp_path, wrapped)
    assert len(first) == 4 and all(map(any, first))
    assert first == second


class _Centred(nn.Linear):
    """Layer with a constant."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("mean", torch.zeros(3))


def broadcasts(comm: Comm) -> list[int]:
    """Returns the number of broadcasts in a forward pass of a model with a constant, and of one with BatchNorm."""
    found = []
    for model in (_Centred(), nn.Sequential(_Centred(), nn.BatchNorm1d(4))):
        wrapped = DdpSpec().wrap(model, comm)  # type: ignore[arg-type]
        with Collectives() as seen:
            wrapped(torch.ones(2, 3))
        found.append(sum(call.kind == "broadcast" for call in seen.calls))
    return found


def test_ddp_broadcasts_buffers_before_a_step_only_with_batchnorm(tmp_path: Path) -> None:
    assert run_in_processes(2, tmp_path, broadcasts) == [[0, 2], [0, 2]]  # floats, and the counter
