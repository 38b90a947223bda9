"""A step in micro-batches beside open_clip's accum_freq: time, memory, exactness."""

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

_TOLERANCE = 1e-3  # of our gradients against float64


@option("bench")
@dataclass(kw_only=True, slots=True)
class AccumulationSpec(BenchSpec):
    """Towers of two transformers, InfoNCE, one process, float32; the largest batch gives the headline's numbers."""

    kind: str = "accumulation"
    # Samples; gradients are compared on the smallest. clipx takes the towers forward 2A - 1 times where open_clip does
    # 2A times, 31/32 of the work at A = 8 whatever they are, and computes the loss once instead of A times: what that
    # saves grows with batch x width over the towers' work. The defaults are towers of the size of model=tiny; large
    # towers with small batches, as width=192 layers=6 image_size=64 context=32 batches=[256], show the other end.
    batches: list[int] = field(default_factory=lambda: [512, 2048])
    micro_batches: int = 8
    width: int = 128  # of both towers and of the embedding
    layers: int = 2
    image_size: int = 48  # pixels, in patches of 16
    context: int = 20  # tokens
    repeats: int = 3  # rounds of the largest batch; smaller ones take up to five times as many

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        require(bool(self.batches), "batches=[] leaves nothing to measure: name at least one, batches=[256]")
        for batch in self.batches:
            require(
                batch >= 2 and batch % self.micro_batches == 0,
                f"batches={self.batches} holds {batch}, which {self.micro_batches} micro_batches cannot share evenly: "
                f"give multiples of {self.micro_batches}",
            )
        self.check_counts("micro_batches", "layers", "repeats", "context")
        require(
            self.width >= 1 and self.width % min(64, self.width) == 0,
            f"width={self.width} is not a number of heads of 64: give a multiple of 64, or less than 64 for one head",
        )
        require(
            self.image_size >= 16 and self.image_size % 16 == 0,
            f"image_size={self.image_size} is not a number of patches of 16 pixels: give a multiple of 16",
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
            rounds = self.repeats * min(5, sizes[-1] // size)  # a short step is more easily disturbed
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
        """Raises BenchError where clipx's gradients are not those of the whole batch."""
        if not (abs(ours.scale_ratio - 1) <= _TOLERANCE and ours.encoder_error <= _TOLERANCE):
            raise BenchError(
                f"clipx's gradients are not those of the whole batch: {ours.scale_ratio:.6g} times the scale's, "
                f"the encoders' off by {ours.encoder_error:.2g}: its time says nothing until they are"
            )

    def _tables(self, figures: dict[str, Any]) -> list[Table]:
        clock = Table(
            f"a step in {self.micro_batches} micro-batches, s",
            ("batch", "clipx", "open_clip", "ratio", "forward of a micro-batch", "open_clip's loss"),
        )
        for size, seconds in figures["seconds"].items():
            shown = [f"{seconds[what]:.4g}" for what in ("ours", "theirs", "forward", "loss")]
            clock.rows.append((size, *shown[:2], f"{figures['time_ratios'][size]:.3f}", *shown[2:]))
        rest = Table("gradients against the whole batch in float64, and peak memory", ("", "clipx", "open_clip"))
        for text, key, form in (
            ("gradient of the log of the scale, times the true one", "logit_scale_ratio", ".5g"),
            ("relative error of the encoders' gradients", "encoder_error", ".1e"),
        ):
            rest.rows.append((text, *(format(figures[f"{key}_{side}"], form) for side in ("ours", "theirs"))))
        peaks = (f"{figures['memory_mib'][side]:,.0f} MiB" for side in ("ours", "theirs"))
        rest.rows.append((f"peak memory beyond weights and batch, batch {figures['batch']}", *peaks))
        return [clock, rest]
