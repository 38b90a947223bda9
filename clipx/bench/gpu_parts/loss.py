"""InfoNCE of clipx and of open_clip, forward and backward from given features, on one of one or several ranks."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from clipx.bench.baselines import contestant, features
from clipx.bench.gpu_parts.report import Report, Sizes, milliseconds
from clipx.bench.measure import peak_memory
from clipx.distributed.comm import Comm

_WIDTH = 512
_ROUNDS = 5
_OPEN_CLIP = {"open_clip amp_bf16": ("open_clip_bf16", ()), "open_clip": ("open_clip", ())}
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "infonce": ("infonce", ()),
    "infonce compiled": ("infonce", ("compile.objective=true",)),
    "infonce fused": ("infonce", ("objective.products=fused",)),
    **_OPEN_CLIP,
}


def run(sizes: Sizes, report: Report) -> None:
    """Measures the loss of a batch on one rank, and of one rank's share, with tensors of its own for the others."""
    total, share = sizes.pick((32_768, 4096), (64, 16))
    for local in (total, share):
        comm = Comm(0, total // local, 0, sizes.place)
        if comm.world > 1:  # one rank without the others: its collectives return its own tensors in place of theirs
            dist.init_process_group("fake", rank=0, world_size=comm.world)
        try:
            _race(sizes, report, comm, local)
        finally:
            comm.close()


def _race(sizes: Sizes, report: Report, comm: Comm, local: int) -> None:
    dim = sizes.pick(_WIDTH, 8)
    pair = features(comm, local, dim, sizes.seed)
    which = f"{local} of {local * comm.world}"
    for title, (name, words) in sizes.pick(VARIANTS, {"infonce": ("infonce", ()), **_OPEN_CLIP}).items():
        label = f"loss {which} {title}"
        try:
            step = partial(contestant(name, comm, local, dim, sizes.seed, words).step, *pair)
            report.number(label, milliseconds(step, sizes.place, _ROUNDS), "ms")
            report.number(f"{label} memory", peak_memory(step, sizes.place) / 2**30, "GiB")
        except torch.OutOfMemoryError as error:
            report.failed(label, error)
