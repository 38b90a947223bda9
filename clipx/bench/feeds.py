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

    rates: dict[str, float] = field(default_factory=lambda: {"ViT-B/32": 8000, "ViT-B/16": 3000, "ViT-L/14": 900})
    """Samples per second that a GPU trains, by name: the table has the cores for each. The defaults are estimates for
    one H200, not measured. Each is above 0."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        self.check_counts("samples", "repeats")
        for name, rate in self.rates.items():
            require(rate > 0, f"rates.{name}={rate:g} must be above 0, in samples per second")

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench.feeding import KINDS, microseconds

        log(f"writing {self.samples:,} samples of each of {len(KINDS)} kinds, and loading them {self.repeats} times")
        with tempfile.TemporaryDirectory() as folder:
            times, sizes = Processes("cpu", 1).run(microseconds, folder, self.samples, self.repeats, self.seed)[0]
        median = {kind: statistics.median(rounds) for kind, rounds in times.items()}
        table = Table(
            "one core; cores that feed the samples per second of a GPU: rates / images per second of one core",
            ("", "KB", "µs", "images/s", *(f"{name}, {rate:,.0f}/s" for name, rate in self.rates.items())),
        )
        for kind, took in median.items():
            cores = (f"{math.ceil(rate * took / 1e6):,}" for rate in self.rates.values())
            table.rows.append(
                (KINDS[kind].label, f"{sizes[kind] / 1e3:.0f}", f"{took:,.0f}", f"{1e6 / took:,.0f}", *cores)
            )
        figures = {
            "microseconds": {kind: rounded(took) for kind, took in median.items()},
            "bytes": {kind: round(size) for kind, size in sizes.items()},
            "cores": {
                name: {kind: rounded(rate * took / 1e6) for kind, took in median.items()}
                for name, rate in self.rates.items()
            },
        }
        return Findings(figures, times, [table])
