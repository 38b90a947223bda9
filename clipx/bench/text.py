"""Training step of ViT-B/32 on captions of realistic lengths: packed texts compared with padded texts and open_clip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clipx.bench.findings import Findings, Table, medians, ratio
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchError, BenchSpec
from clipx.config.registry import option
from clipx.errors import require

_TOLERANCE = 1e-5  # relative error of the loss in float32


@option("bench")
@dataclass(kw_only=True, slots=True)
class TextSpec(BenchSpec):
    """Whole training steps with packed and with padded texts, and of open_clip, on the same batch.

    Both towers of ViT-B/32, InfoNCE, AdamW, float32, one process.
    """

    kind: str = "text"
    """Name of this benchmark in the registry."""

    batch: int = 32
    """Number of samples in a step. At least 2."""

    repeats: int = 5
    """Number of rounds, in each of which all implementations take a step in turns. At least 1."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        require(self.batch >= 2, f"batch={self.batch} must be at least 2: one sample has no negatives")
        self.check_counts("repeats")

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench import laps, training

        device = self.device_type()
        runs = {
            name: ["model=vit_b32", "precision=fp32", f"model.text.packed={name == 'packed'}"]
            for name in ("packed", "padded")
        }
        length_B = (training.captions(self.batch, 77, self.seed) != 0).sum(dim=1)
        log(f"steps of {self.batch} samples on {device}, captions of {length_B.float().mean():.1f} tokens on average")
        course = laps.Course(runs, ["eager"], self.batch, 1, self.repeats, self.seed)
        rows, times = Processes(device, self.threads).run(laps.race, course)[0]
        losses = {row.name: row.loss for row in rows}
        times["open_clip"] = times.pop("open_clip fp32 eager")
        error = abs(losses["packed"] / losses["padded"] - 1)
        if error > _TOLERANCE:
            raise BenchError(f"packed texts change the loss by a relative {error:.2g}: their times are not valid")
        seconds = medians(times)
        table = Table(f"training step of {self.batch} samples", ("", "s", "packed, relative"))
        for name, took in seconds.items():
            table.rows.append((name, f"{took:.3f}", f"{ratio(times['packed'], times[name]):.3f}"))
        figures = {
            "device": device,
            "batch": self.batch,
            "median_tokens": int(length_B.median()),
            "mean_tokens": round(length_B.float().mean().item(), 2),
            "step_ratio": round(ratio(times["packed"], times["padded"]), 4),
            "open_clip_ratio": round(ratio(times["packed"], times["open_clip"]), 4),
            "seconds": seconds,
            "loss_error": float(f"{error:.3g}"),
        }
        return Findings(figures, {"times": times, "losses": losses}, [table])
