"""Every objective with several numbers of micro-batches on this rank's share of a global batch, in float64.

`main` is called on each rank. Two optimizer steps each, on small towers. Rank 0 writes `out`: losses on all ranks, every
gradient, the per-sample state; and `out`.json: how often each collective ran in forward and backward of a step, from
the process group's records.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from clipx.config.duration import Length
from clipx.data.batch import Batch
from clipx.distributed.comm import Comm
from clipx.distributed.spec import DistributedSpec
from clipx.objective.base import Metrics
from clipx.objective.distillation import DistillationSpec
from clipx.objective.spec import ObjectiveSpec
from clipx.trainer.gradcache import GradCache
from helpers.objective_cases import FACTS, FP64, POSITIVES, Towers, in_words, inputs, part_of, read, with_captions
from helpers.ranks import Ranks

SIZE, SAMPLES, LR = 24, 61, 0.5  # a number of samples that no number of ranks divides
# on two ranks, with the smallest and the largest number of micro-batches
COUNTED = ("infonce", "infonce of 3 captions", "siglip", "fastclip_v1", "fastclip_v3", "neuclip")
Collectives = dict[str, dict[str, int]]


def share(comm: Comm, step: int, captions: int) -> Batch:
    """Returns this rank's part of the step's batch, in which one sample occurs on the first and on the last rank.

    `captions`: captions of each sample that the objective compares. 0: one, without digests.
    """
    batch = inputs(SIZE, SAMPLES, seed=step)
    batch.index[-3] = batch.index[1]
    batch = with_captions(batch, captions, step) if captions else batch
    return part_of(batch, slice(comm.rank * SIZE // comm.world, (comm.rank + 1) * SIZE // comm.world))


def teachers(batch: Batch, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Outputs of frozen teachers for a batch, (image, text) of each.

    Features of other widths than the towers', and their products as logits.
    """
    generator, found = torch.Generator().manual_seed(7), list[Tensor]()
    for width in widths:
        mix = [torch.randn(7, width, generator=generator, dtype=torch.float64) for _ in range(2)]
        image, text = (
            F.normalize(x @ m, dim=1) for x, m in zip((batch.image.rows[0], batch.text.rows[0]), mix, strict=True)
        )
        found += [6 * image, text]
    return tuple(found)


class Run:
    """Training of one objective on small towers."""

    def __init__(self, comm: Comm, spec: ObjectiveSpec, micro_batches: int, captions: int = 0) -> None:
        self.comm, self.micro_batches, self.captions, self.reads_trunk = comm, micro_batches, captions, spec.reads_trunk
        self.model = Towers()
        self.model.returns_trunk = spec.reads_trunk
        self.parallel = DistributedDataParallel(self.model) if comm.world > 1 else self.model
        self.teachers = ((4, 3) if spec.teacher_logits else (4,)) if spec.taught else ()  # widths
        if isinstance(spec, DistillationSpec) and spec.embedding_weight:
            self.teachers = (5, 5)
        self.objective = spec.build(comm, Length(epoch=SAMPLES, batch=SIZE, total=6 * SAMPLES))
        self.objective.prepare(None, FACTS)
        self.objective.double()
        objectives = ((f"objective.{name}", p) for name, p in self.objective.named_parameters())
        self.parameters = dict((*self.model.named_parameters(), *objectives))

    def forward_backward(self, step: int) -> tuple[Tensor, Metrics]:
        batch = share(self.comm, step, self.captions)
        if self.teachers:
            batch = replace(batch, targets=teachers(batch, self.teachers))
        batch = in_words(batch) if self.reads_trunk else batch
        cached = GradCache(
            self.parallel, self.objective, self.comm, FP64, self.micro_batches, reads_trunk=self.reads_trunk
        )
        loss, metrics, _ = cached.forward_backward(batch)
        return loss, metrics

    def step(self, step: int) -> dict[str, Tensor]:
        """Takes a step in the second epoch, where the moving average moves. Returns loss, metrics and gradients."""
        seen = SAMPLES + step * SIZE
        self.objective.before_step(seen)
        loss, metrics = self.forward_backward(step)
        found = {"losses": self.comm.gather(loss[None]), **{name: value.double() for name, value in metrics.items()}}
        for name, p in self.parameters.items():
            everywhere = self.comm.gather(p.grad[None])
            assert torch.equal(everywhere[0], everywhere[-1]), f"{name} differs between the ranks"
            found[name] = everywhere[0].clone()
        with torch.no_grad():  # gradient descent by hand: importing torch.optim takes 2 s
            for p in self.parameters.values():
                p -= LR * p.grad
                p.grad = None
        self.objective.after_step(seen + SIZE)
        return found

    def collectives(self) -> dict[str, int]:
        """Counts the collectives of a step that is not taken.

        Not of the second step: DataParallel synchronises its buckets there, once.
        """
        if isinstance(self.parallel, DistributedDataParallel):
            self.parallel.register_comm_hook(self.comm.world, reduce_and_wait)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            self.forward_backward(0)
        if not self.comm.is_main:
            return {}
        return Counter(e.name.removeprefix("gloo:") for e in recorded.events() if e.name.startswith("gloo:"))


def reduce_and_wait(world, bucket):  # type: ignore[no-untyped-def]  # DataParallel refuses annotations as text
    """Averages a bucket of DataParallel's gradients over the ranks, and waits for it: DataParallel waits for a future.

    The profiler records the end of a collective after its future is complete: in torch 2.11 sometimes too late.
    """
    dist.all_reduce(bucket.buffer().div_(world))
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def main(out: Path, specs: dict[str, ObjectiveSpec], micro_batches: list[int]) -> None:
    comm = DistributedSpec(device="cpu").build()
    found: dict[str, Tensor] = {}
    counts: Collectives = {}
    for variant, spec in specs.items():
        for number in micro_batches:
            run = Run(comm, spec, number, POSITIVES.get(variant, (0,))[0])
            for step in range(2):
                found |= {f"{variant}/{number}/{step}/{name}": t for name, t in run.step(step).items()}
            found[f"{variant}/{number}/table"] = read(run.objective, SAMPLES).contiguous()
            found |= {f"{variant}/{number}/{name}": t.clone() for name, t in run.objective.state_dict().items()}
            if comm.world == 2 and variant in COUNTED and number in (micro_batches[0], micro_batches[-1]):
                counts[f"{variant}/{number}"] = run.collectives()
    if comm.is_main:
        save_file(found, out)
        out.with_suffix(".json").write_text(json.dumps(counts))
    comm.barrier()
    comm.close()


def assert_same_on_ranks(
    two_ranks: Ranks,
    folder: Path,
    whole: dict[str, ObjectiveSpec],
    tiled: dict[str, ObjectiveSpec],
    micro_batches: tuple[int, ...] = (1, 2),
) -> None:
    """Compares ranks {1, 2, 3} x micro-batches with one pass of one process, to 1e-10. `tiled`: specs on several ranks."""
    main(folder / "1", whole, [1, 3])
    two_ranks.call(main, folder / "2", tiled, [*micro_batches])
    with contextlib.closing(Ranks(3, folder)) as three:
        three.call(main, folder / "3", tiled, [*micro_batches])
    alone = load_file(folder / "1")
    for found in (alone, load_file(folder / "2"), load_file(folder / "3")):
        assert len(found) > 40
        for name, value in found.items():
            kind, _, what = name.split("/", 2)  # the second part is the number of micro-batches
            expected = alone[f"{kind}/1/{what}"].expand_as(value)
            torch.testing.assert_close(
                value, expected, rtol=0, atol=1e-10, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
