"""Training step in micro-batches, compared with open_clip's accum_freq: time, memory, error of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clipx.bench.findings import Findings, Table, medians, ratio, rounded
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchError, BenchSpec
from clipx.config.registry import option
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.bench.steps import Gradients

_TOLERANCE = 1e-3  # relative error of clipx's gradients against float64


@option("bench")
@dataclass(kw_only=True, slots=True)
class AccumulationSpec(BenchSpec):
    """Step in micro-batches, compared with open_clip's accum_freq. Two transformers, InfoNCE, one process, float32.

    clipx computes 2A - 1 forwards of a micro-batch for A micro-batches and open_clip 2A, which is 31/32 of the towers'
    work at A = 8, and the loss once instead of A times: the saving grows with batch x width relative to the towers'
    work. The default towers have the size of model=tiny. Large towers with small batches are the opposite case:
    width=192 layers=6 image_size=64 context=32 batches=[256].
    """

    kind: str = "accumulation"
    """Name of this benchmark in the registry."""

    batches: list[int] = field(default_factory=lambda: [512, 2048])
    """Batch sizes in samples. Each is at least 2 and a multiple of `micro_batches`. Gradients are compared on the
    smallest; the largest gives the headline numbers."""

    micro_batches: int = 8
    """Number of micro-batches in a step. At least 1."""

    width: int = 128
    """Width of both towers and of the embeddings: a multiple of 64, the width of a head, or below 64 for one head."""

    layers: int = 2
    """Number of layers of each tower. At least 1."""

    image_size: int = 48
    """Side of the images in pixels. A multiple of 16, the side of a patch."""

    context: int = 20
    """Number of tokens of each text. At least 1."""

    repeats: int = 3
    """Number of rounds of the largest batch. At least 1. Smaller batches take up to five times as many."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        require(bool(self.batches), "batches=[] is empty: give at least one, batches=[256]")
        for batch in self.batches:
            require(
                batch >= 2 and batch % self.micro_batches == 0,
                f"batches={self.batches} contains {batch}, which is not divisible by micro_batches="
                f"{self.micro_batches}: give multiples of {self.micro_batches}",
            )
        self.check_counts("micro_batches", "layers", "repeats", "context")
        require(
            self.width >= 1 and self.width % min(64, self.width) == 0,
            f"width={self.width} must be a multiple of 64, the width of a head, or below 64 for one head",
        )
        require(
            self.image_size >= 16 and self.image_size % 16 == 0,
            f"image_size={self.image_size} must be a multiple of 16, the side of a patch",
        )

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench import steps

        device = self.device_type()
        processes = Processes(device, self.threads)
        towers = steps.TowerConfig(self.width, self.layers, self.image_size, self.context)
        sizes, parts = sorted(set(self.batches)), self.micro_batches
        log(f"gradients: batch {sizes[0]} on {device}")
        found: dict[str, Gradients] = processes.run(steps.gradients, towers, sizes[0], parts, self.seed)[0]
        self._check(found["ours"])
        times: dict[int, dict[str, list[float]]] = {}
        for size in sizes:
            log(f"time: batch {size}")
            rounds = self.repeats * min(5, sizes[-1] // size)  # timings of short steps vary more
            times[size] = processes.run(steps.times, towers, size, parts, rounds, self.seed)[0]
        log(f"memory: batch {sizes[-1]}")
        peaks: list[list[int]] = processes.in_pairs(
            lambda half, side: half.run(steps.memory, towers, sizes[-1], parts, self.seed, side), ("ours", "theirs")
        )
        memory = {"ours": peaks[0][0], "theirs": peaks[1][0]}

        ratios = {size: ratio(times[size]["ours"], times[size]["theirs"]) for size in sizes}
        figures: dict[str, Any] = {
            "device": device,
            "batch": sizes[-1],
            "micro_batches": parts,
            "time_ratio": rounded(ratios[sizes[-1]]),
            "time_ratios": {str(size): rounded(ratios[size]) for size in sizes},
            "seconds": {str(size): medians(times[size]) for size in sizes},
            "memory_ratio": rounded(memory["ours"] / memory["theirs"]),
            "memory_mib": {side: rounded(peak / 2**20) for side, peak in memory.items()},
            **{f"logit_scale_ratio_{side}": round(g.scale_ratio, 5) for side, g in found.items()},
            **{f"encoder_error_{side}": rounded(g.encoder_error) for side, g in found.items()},
        }
        return Findings(figures, {"times": times, "memory": memory}, self._tables(figures))

    def _check(self, ours: Gradients) -> None:
        """Raises BenchError if clipx's gradients differ from those of the whole batch."""
        if not (abs(ours.scale_ratio - 1) <= _TOLERANCE and ours.encoder_error <= _TOLERANCE):
            raise BenchError(
                f"clipx's gradients differ from those of the whole batch: {ours.scale_ratio:.6g} times the scale's, "
                f"relative error of the towers' {ours.encoder_error:.2g}: its times are not valid"
            )

    def _tables(self, figures: dict[str, Any]) -> list[Table]:
        clock = Table(
            f"step in {self.micro_batches} micro-batches, s",
            ("batch", "clipx", "open_clip", "ratio", "forward of a micro-batch", "open_clip's loss"),
        )
        for size, seconds in figures["seconds"].items():
            shown = [f"{seconds[what]:.4g}" for what in ("ours", "theirs", "forward", "loss")]
            clock.rows.append((size, *shown[:2], f"{figures['time_ratios'][size]:.3f}", *shown[2:]))
        rest = Table("gradients against the whole batch in float64, and peak memory", ("", "clipx", "open_clip"))
        for text, key, form in (
            ("gradient of the log of the scale, relative to the exact one", "logit_scale_ratio", ".5g"),
            ("relative error of the towers' gradients", "encoder_error", ".1e"),
        ):
            rest.rows.append((text, *(format(figures[f"{key}_{side}"], form) for side in ("ours", "theirs"))))
        peaks = (f"{figures['memory_mib'][side]:,.0f} MiB" for side in ("ours", "theirs"))
        rest.rows.append((f"peak memory without weights and batch, batch {figures['batch']}", *peaks))
        return [clock, rest]
