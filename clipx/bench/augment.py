"""CPU time of loading an image with each augmentation and caption mask, compared with loading it without."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from clipx.bench.findings import Findings, Table, ratio, rounded
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchSpec
from clipx.config.registry import option
from clipx.errors import require


@option("bench")
@dataclass(kw_only=True, slots=True)
class AugmentBenchSpec(BenchSpec):
    """CPU time of loading an image, by augmentation, in one thread: crops of 224 pixels, each augmentation always."""

    kind: str = "augment"
    """Name of this benchmark in the registry."""

    side: int = 512
    """Width of the photographs in pixels, with the aspect 4:3. At least 32."""

    samples: int = 128
    """Number of photographs, which are one batch. At least 1."""

    repeats: int = 9
    """Number of rounds, in each of which all augmentations are loaded once, in turns. At least 1."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        self.check_counts("samples", "repeats")
        require(self.side >= 32, f"side={self.side} must be at least 32 pixels")

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench.augmenting import CASES, microseconds

        log(f"writing {self.samples:,} photographs, and loading them {self.repeats} times in {len(CASES)} ways")
        with tempfile.TemporaryDirectory() as folder:
            times, tensors = Processes("cpu", 1).run(
                microseconds, f"{folder}/shards", self.side, self.samples, self.repeats, self.seed
            )[0]
        ratios = {name: round(ratio(took, times["plain"]), 3) for name, took in times.items()}
        median = {name: rounded(statistics.median(took)) for name, took in times.items()}
        tensor = {name: rounded(statistics.median(took)) for name, took in tensors.items()}
        table = Table(
            "CPU time of a loader process per image, and of the operations of data.decode=gpu on the CPU",
            ("", "µs", "ratio to plain", "tensors, µs"),
        )
        for name, case in CASES.items():
            on_tensors = f"{tensor[name]:,.0f}" if name in tensor else "–"
            table.rows.append((case.label, f"{median[name]:,.0f}", f"{ratios[name]:.2f}", on_tensors))
        figures = {"side": self.side, "ratios": ratios, "microseconds": median, "tensor_microseconds": tensor}
        return Findings(figures, {"loading": times, "tensors": tensors}, [table])
