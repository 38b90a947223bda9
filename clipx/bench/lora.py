"""Training step with low-rank adapters (LoRA, DoRA), compared with training all weights: time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from clipx.bench.findings import Findings, Table, medians, ratio, rounded
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchError, BenchSpec
from clipx.config.lazy_torch import torch
from clipx.config.registry import option
from clipx.distributed.comm import Comm
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.bench import laps

_TOLERANCE = 1e-5  # relative difference of the first loss in float32


@option("bench")
@dataclass(kw_only=True, slots=True)
class LoraBenchSpec(BenchSpec):
    """Whole training steps that train all weights, LoRA or DoRA in both towers, on the same batches.

    InfoNCE, AdamW, one process. The first step has the same loss in all of them.
    """

    kind: str = "lora"
    """Name of this benchmark in the registry."""

    architecture: str = "vit_b32"
    """Model, an option of the group model."""

    number_format: str = "fp32"
    """Number format, an option of the group precision."""

    batch: int = 32
    """Number of samples in a step. At least 2."""

    rank: int = 8
    """Rank of the adapters of all linear layers in the blocks of both towers. At least 1."""

    repeats: int = 5
    """Number of rounds, in each of which all variants take a step in turns. At least 1."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        require(self.batch >= 2, f"batch={self.batch} must be at least 2: one sample has no negatives")
        self.check_counts("repeats", "rank")

    def variants(self) -> dict[str, list[str]]:
        """Returns the overrides of the runs by name. Their weights are random, as times do not depend on them."""
        base = [f"model={self.architecture}", f"precision={self.number_format}"]
        sides = [f"model.{side}.lora" for side in ("image", "text")]
        lora = [*base, "model.weights=none_is_read", *(f"{key}.rank={self.rank}" for key in sides)]
        return {"all weights": base, "LoRA": lora, "DoRA": [*lora, *(f"{key}.dora=true" for key in sides)]}

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench import laps

        device = self.device_type()
        course = laps.Course(self.variants(), [], self.batch, 1, self.repeats, self.seed)
        log(f"time: steps of {self.batch} samples on {device}")
        losses, times, cpu_times = Processes(device, self.threads).run(race, course)[0]
        spread = max(losses.values()) / min(losses.values()) - 1
        if spread > _TOLERANCE:
            raise BenchError(f"the first losses differ by a relative {spread:.2g}: the times are not valid")
        found = {}
        for name in course.runs:
            log(f"memory: {name}")
            found[name] = Processes(device, self.threads).run(memory, course, name)[0]
        first, *adapted = course.runs
        figures: dict[str, Any] = {
            "device": device,
            "model": self.architecture,
            "batch": self.batch,
            "rank": self.rank,
            "time_ratios": {name: rounded(ratio(times[name], times[first])) for name in adapted},
            "cpu_time_ratios": {name: rounded(ratio(cpu_times[name], cpu_times[first])) for name in adapted},
            "memory_ratios": {name: rounded(_total(found[name]) / _total(found[first])) for name in adapted},
            "seconds": medians(times),
            "cpu_seconds": medians(cpu_times),
            "memory_mib": {
                name: {part: rounded(size / 2**20) for part, size in parts.items() if part != "trained"}
                for name, parts in found.items()
            },
            "trained_parameters": {name: parts["trained"] for name, parts in found.items()},
            "loss_difference": float(f"{spread:.3g}"),
        }
        return Findings(
            figures,
            {"times": times, "cpu_times": cpu_times, "losses": losses, "memory": found},
            [_table(self, figures, found)],
        )


def race(comm: Comm, course: laps.Course) -> tuple[dict[str, float], dict[str, list[float]], dict[str, list[float]]]:
    """Returns by variant the loss of the first step, and the seconds of a step and the CPU time of the process in each
    round. On the CPU the latter is that of the step, on a busy machine too."""
    from clipx.bench.measure import interleaved
    from clipx.report.console import stdout_console

    contenders = {name: build() for name, build in course.builders(comm).items()}
    losses = {name: contender.warm_up(1) for name, contender in contenders.items()}
    cpu_times: dict[str, list[float]] = {name: [] for name in contenders}

    def turn(name: str) -> None:
        start = time.process_time()
        contenders[name].lap(1)
        cpu_times[name].append(time.process_time() - start)

    turns = {name: partial(turn, name) for name in contenders}
    times = interleaved(turns, course.rounds, comm, log=stdout_console().print)
    return losses, times, cpu_times


def memory(comm: Comm, course: laps.Course, name: str) -> dict[str, int]:
    """Returns the bytes of a run's weights, of its optimizer's state, and of the peak of a step without these; and the
    number of trained parameters."""
    from clipx.bench.measure import peak_memory, return_freed_memory

    return_freed_memory()
    contender = course.builders(comm)[name]()
    contender.lap(1)  # allocates the optimizer's state
    learner = contender.learner
    assert learner is not None
    state = [x for values in learner.optimizer.state.values() for x in values.values() if torch.is_tensor(x)]
    trained = sum(p.numel() for p in learner.weights.parameters() if p.requires_grad)
    return {
        "weights": sum(x.nbytes for x in (*learner.weights.parameters(), *learner.weights.buffers())),
        "optimizer": sum(x.nbytes for x in state),
        "step": peak_memory(lambda: contender.lap(1), comm.device),
        "trained": trained,
    }


def _total(parts: dict[str, int]) -> int:
    return parts["weights"] + parts["optimizer"] + parts["step"]


def _table(spec: LoraBenchSpec, figures: dict[str, Any], found: dict[str, dict[str, int]]) -> Table:
    columns = (
        "",
        "trained",
        "step, s",
        "relative",
        "CPU s",
        "relative",
        "weights, MiB",
        "optimizer",
        "peak of the step",
        "sum, relative",
    )
    table = Table(f"{spec.architecture}, {spec.batch} samples, rank {spec.rank}, {figures['device']}", columns)
    for name, parts in found.items():
        mib = [f"{parts[part] / 2**20:,.0f}" for part in ("weights", "optimizer", "step")]
        clock = [
            text
            for kind in ("", "cpu_")
            for text in (f"{figures[f'{kind}seconds'][name]:.3g}", f"{figures[f'{kind}time_ratios'].get(name, 1):.3f}")
        ]
        table.rows.append((name, f"{parts['trained']:,}", *clock, *mib, f"{figures['memory_ratios'].get(name, 1):.3f}"))
    return table
