"""What collectives take between processes of this machine. For the benchmark of the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from clipx.bench.measure import interleaved
from clipx.distributed.comm import Comm

KINDS = ("all_gather", "all_reduce", "broadcast")


def times(comm: Comm, sizes: Sequence[int], rounds: int) -> dict[tuple[str, int], list[float]]:
    """Seconds on this rank, of each kind and size in bytes (of the larger side), in each round."""
    steps = {(kind, size): _step(kind, size, comm.world, comm.device) for kind in KINDS for size in sizes}
    interleaved(steps, 1, comm)  # the warm-up
    return interleaved(steps, rounds, comm)


def _step(kind: str, size: int, ranks: int, device: torch.device) -> Callable[[], object]:
    whole = torch.zeros(-(-size // (4 * ranks)) * ranks, device=device)
    part = whole.chunk(ranks)[0].clone()
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }[kind]


def model_sizes(name: str) -> tuple[int, int, int, int]:
    """Parameters, floating point operations of a sample's forward, width of the embedding, and bytes of buffers, of a
    model of clipx's. Nothing of it is allocated."""
    from torch.utils.flop_counter import FlopCounterMode

    from clipx.trainer.spec import compose

    spec, meta = compose(f"model={name}").model, torch.device("meta")
    model = spec.build(meta, torch.float32)
    side, length = spec.image.size, spec.text.context_length
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, side, side, device=meta), torch.zeros(1, length, dtype=torch.long, device=meta))
    parameters = sum(p.numel() for p in model.parameters())
    return parameters, counter.get_total_flops(), model.embed_dim, sum(b.nbytes for b in model.buffers())
