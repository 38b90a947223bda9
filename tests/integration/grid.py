"""Run by torchrun: every objective with several numbers of micro-batches on this rank's share of a global batch, float64.

    grid.py OUT MICRO_BATCHES...

Two optimizer steps each, on small towers. Rank 0 writes `OUT`: losses on all ranks, every gradient, the per-sample state;
and `OUT.json`: how often each collective ran in a step of forward and backward, from the process group's own records.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from numerics.cases import FP64, VARIANTS, Towers, build, inputs, read
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from clipx.data.loader import Batch
from clipx.distributed import Comm, DistributedSpec
from clipx.gradcache import forward_backward

SIZE, SAMPLES, LR = 24, 60, 0.5
COUNTED = ("infonce", "siglip", "fastclip_v1", "fastclip_v2", "fastclip_v3")


def share(comm: Comm, step: int) -> Batch:
    """This rank's part of the step's batch, in which one sample occurs on the first and on the last rank."""
    batch = inputs(SIZE, SAMPLES, seed=step)
    batch.index[-3] = batch.index[1]
    part = slice(comm.rank * SIZE // comm.world, (comm.rank + 1) * SIZE // comm.world)
    return Batch(batch.image[part], batch.tokens[part], batch.index[part])


def run(comm: Comm, variant: str, micro_batches: int) -> tuple[dict[str, Tensor], Counter[str]]:
    """Everything two steps leave, and the collectives of the second."""
    model = Towers()
    parallel = DistributedDataParallel(model) if comm.world > 1 else model
    objective = build(variant, samples=SAMPLES, batch=SIZE, comm=comm)
    parameters = [*model.parameters(), *objective.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LR)
    found, collectives = {}, Counter[str]()
    for step in range(2):
        seen = SAMPLES + step * SIZE  # the second epoch: the moving average moves
        optimizer.zero_grad()
        objective.before_step(seen)
        counting = comm.world > 1 and step == 1 and variant in COUNTED
        with profile(activities=[ProfilerActivity.CPU]) if counting else torch.enable_grad() as recorded:
            loss, metrics = forward_backward(parallel, objective, share(comm, step), micro_batches, comm, FP64)
        if counting:
            collectives = Counter(e.name.removeprefix("gloo:") for e in recorded.events() if e.name.startswith("gloo:"))
        found[f"{step}/losses"] = comm.gather(loss[None])
        found |= {f"{step}/{name}": value.double() for name, value in metrics.items()}
        for name, p in (*model.named_parameters(), *objective.named_parameters()):
            everywhere = comm.gather(p.grad[None])
            assert torch.equal(everywhere[0], everywhere[-1]), f"{name} differs between the ranks"
            found[f"{step}/{name}"] = everywhere[0].clone()
        optimizer.step()
        objective.after_step(seen + SIZE)
    return {**found, "table": read(objective, SAMPLES).clone()}, collectives


def main(out: Path, micro_batches: list[int]) -> None:
    comm = DistributedSpec(device="cpu").build()
    found: dict[str, Tensor] = {}
    counts: dict[str, dict[str, int]] = {}
    for variant in VARIANTS:
        for number in micro_batches:
            tensors, collectives = run(comm, variant, number)
            found |= {f"{variant}/{number}/{name}": t.contiguous() for name, t in tensors.items()}
            if collectives:
                counts[f"{variant}/{number}"] = dict(collectives)
    if comm.is_main:
        save_file(found, out)
        out.with_suffix(".json").write_text(json.dumps(counts))
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(number) for number in sys.argv[2:]])
