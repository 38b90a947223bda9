"""A ViT-B/32 training step on captions as long as real ones, with and without what follows their end tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clipx.bench.findings import Findings, Table, medians, ratio
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchError, BenchSpec
from clipx.config.registry import option
from clipx.errors import require

_TOLERANCE = 1e-5  # relative, of the loss in float32


@option("bench")
@dataclass(kw_only=True, slots=True)
class TextSpec(BenchSpec):
    """Whole steps: both towers, InfoNCE, AdamW, float32, one process; the same weights and batch on both sides."""

    kind: str = "text"
    batch: int = 32  # samples
    repeats: int = 5  # rounds

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        require(self.batch >= 2, f"batch={self.batch} has no negatives: give at least 2")
        self.check_counts("repeats")

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench import training

        device = self.device_type()
        runs = {name: ("model=vit_b32", f"model.text.packed={name == 'packed'}") for name in ("packed", "padded")}
        length_B = (training.captions(self.batch, 77, self.seed) != 0).sum(dim=1)
        log(f"steps of {self.batch} samples on {device}, captions of {length_B.float().mean():.1f} tokens on average")
        times, losses = Processes(device, self.threads).run(
            training.times, runs, True, self.batch, self.repeats, self.seed
        )[0]
        error = abs(losses["packed"] / losses["padded"] - 1)
        if error > _TOLERANCE:
            raise BenchError(f"packed texts give another loss, by {error:.2g}: the time says nothing until they do not")
        seconds = medians(times)
        table = Table(f"a training step of {self.batch} samples", ("", "s", "packed takes"))
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
