"""Images per second of one core by the images in the shards, and the cores that feed a GPU."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field

from clipx.bench.findings import Findings, Table, rounded
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchSpec
from clipx.config.registry import option
from clipx.errors import require


@option("bench")
@dataclass(kw_only=True, slots=True)
class FeedsSpec(BenchSpec):
    """CPU time of loading an image, by what the shards contain, in one thread: crops of 224 pixels."""

    kind: str = "feeds"
    """Name of this benchmark in the registry."""

    samples: int = 256
    """Number of samples of each kind, which are one batch. At least 1."""

    repeats: int = 9
    """Number of rounds, in each of which every kind is loaded once, in turns. At least 1."""

    rates: list[int] = field(default_factory=lambda: [10_200, 3_400, 830])
    """Samples per second that a GPU trains, for which the table has the cores. The defaults are estimates for one H200
    and ViT-B/32, B/16 and L/14, not measured. Each is at least 1."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        self.check_counts("samples", "repeats")
        require(min(self.rates, default=0) >= 1, f"rates={self.rates} must contain numbers of at least 1: [10200]")

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench.feeding import KINDS, microseconds

        log(f"writing {self.samples:,} samples of each of {len(KINDS)} kinds, and loading them {self.repeats} times")
        with tempfile.TemporaryDirectory() as folder:
            times, sizes = Processes("cpu", 1).run(microseconds, folder, self.samples, self.repeats, self.seed)[0]
        median = {kind: statistics.median(rounds) for kind, rounds in times.items()}
        table = Table(
            "one core, and the number of cores that load so many samples per second",
            ("", "KB", "µs", "images/s", *(f"{rate:,}/s" for rate in self.rates)),
        )
        for kind, took in median.items():
            cores = (f"{math.ceil(rate * took / 1e6):,}" for rate in self.rates)
            table.rows.append(
                (KINDS[kind].label, f"{sizes[kind] / 1e3:.0f}", f"{took:,.0f}", f"{1e6 / took:,.0f}", *cores)
            )
        figures = {
            "microseconds": {kind: rounded(took) for kind, took in median.items()},
            "bytes": {kind: round(size) for kind, size in sizes.items()},
            "cores": {
                str(rate): {kind: rounded(rate * took / 1e6) for kind, took in median.items()} for rate in self.rates
            },
        }
        return Findings(figures, times, [table])
