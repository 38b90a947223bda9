"""Data loader, JPEG shards to batches, compared with open_clip's; or the time that a run waits for its loader."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clipx.bench.processes import Processes
from clipx.bench.spec import BenchSpec, Findings, Table, ratio
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.errors import require


@register("bench")
@frozen
class LoaderSpec(BenchSpec):
    """Data loader compared with open_clip's: random crops of 224 pixels of synthetic photographs in shards."""

    kind: str = "loader"
    """Name of this benchmark in the registry."""

    of: str | None = None
    """Run, a directory or a URL, whose loader is measured instead, with a report whether the run waits for it and what
    to change. null: measures synthetic photographs."""

    sides: list[int] = option([256, 512], ge=32, when="not of")
    """Widths of the photographs in pixels, which are measured one after the other."""

    samples: int = option(2048, when="not of")
    """Number of photographs of each width. At least two batches."""

    batch: int = option(128, ge=1, when="not of")
    """Number of samples in a batch."""

    workers: int = option(2, ge=1, when="not of")
    """Number of worker processes of each loader."""

    batches: int = option(20, ge=1)
    """Number of batches that a round measures, after as many as a loader prefetches."""

    repeats: int = option(3, ge=1, when="not of")
    """Number of rounds, in each of which all loaders run in turns."""

    def __post_init__(self) -> None:
        require(
            self.samples >= 2 * self.batch,
            f"samples={self.samples} must be at least {2 * self.batch}, two batches of batch={self.batch}",
        )

    def run(self, log: Callable[[str], None]) -> Findings:
        if self.of is not None:
            from clipx.bench.loader_advice import measure_run

            return measure_run(self, self.of, log)
        with tempfile.TemporaryDirectory() as folder:
            rates = {side: self._rates(side, Path(folder) / str(side), log) for side in sorted(set(self.sides))}
        median = {side: {name: statistics.median(r) for name, r in found.items()} for side, found in rates.items()}
        figures: dict[str, Any] = {"workers": self.workers}
        for side, found in rates.items():
            figures[f"ratio_{side}"] = round(ratio(found["clipx"], found["open_clip"]), 3)
            figures[f"share_of_decode_bound_{side}"] = round(ratio(found["clipx"], found["decode"]), 3)
        figures["images_per_second"] = {str(side): {k: round(v) for k, v in m.items()} for side, m in median.items()}
        columns = ("", "clipx", "open_clip", "clipx / open_clip", "decoding alone", "clipx / decoding")
        table = Table(f"images per second with {self.workers} workers", columns)
        for side, m in median.items():
            ours, theirs, bound = (f"{m[name]:,.0f}" for name in ("clipx", "open_clip", "decode"))
            shares = (f"{figures[f'{key}_{side}']:.2f}" for key in ("ratio", "share_of_decode_bound"))
            table.rows.append((f"{side} px", ours, theirs, next(shares), bound, next(shares)))
        return Findings(figures, {str(side): found for side, found in rates.items()}, [table])

    def _rates(self, side: int, folder: Path, log: Callable[[str], None]) -> dict[str, list[float]]:
        """Measures the images per second of each loader in each round."""
        from clipx.bench import pipelines, shards

        log(f"{side} pixels: writing {self.samples:,} photographs")
        folder.mkdir()
        shards.write(folder, self.samples, side, self.seed)
        processes = Processes("cpu", self.threads)
        rates: dict[str, list[float]] = {name: [] for name in pipelines.CONTESTANTS}
        load = (str(folder), self.batch, self.workers, self.batches, self.seed)
        for i in range(self.repeats):
            log(f"{side} pixels: round {i + 1} of {self.repeats}")
            for name, contestant in pipelines.CONTESTANTS.items():
                rates[name].append(processes.run(contestant, *load))
        return rates
