"""Options and results of all benchmarks. A benchmark is one file and one YAML, `python -m clipx.bench <name> [key=value
…]`.

It measures clipx and another implementation in turns, in the same run and on the same inputs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from clipx.config.options import option
from clipx.config.registry import MISSING, frozen
from clipx.errors import ClipxError, require

K = TypeVar("K")


class BenchError(ClipxError):
    """A measurement failed or is not valid."""


@dataclass(slots=True)
class Table:
    """Table of text cells for the terminal. The first columns name a row, the others contain numbers."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)


@dataclass(slots=True)
class Findings:
    """Results of a benchmark."""

    figures: dict[str, Any]  # headline numbers and ratios; the last line of the output has them with name and folder
    details: Any  # all measurements, for results.json
    tables: Sequence[Table]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the median over the rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def medians(times: Mapping[K, Sequence[float]]) -> dict[K, float]:
    """Returns the median of each implementation's rounds, rounded to four digits."""
    return {name: rounded(statistics.median(rounds)) for name, rounds in times.items()}


def rounded(value: float) -> float:
    """Rounds to four digits."""
    return float(f"{value:.4g}")


@frozen
class BenchSpec:
    """Base class of the options of benchmarks."""

    kind: str = MISSING
    """Name of the benchmark in the registry. Choose a benchmark as the first word of the command line."""

    run_dir: str = MISSING
    """Folder in which results.json is written. It must not contain results.json yet."""

    device: str = option("auto", choices=("auto", "cpu", "cuda"))
    """Device to measure on. auto is cuda if a CUDA device is visible, else cpu."""

    threads: int = option(0, ge=0)
    """Number of CPU threads that all concurrent processes share. 0: the number of available cores."""

    seed: int = option(0, ge=0)
    """Seed of the random weights and inputs."""

    resumable: ClassVar[bool] = False
    """Declares that a second call with the same run_dir continues."""

    def device_type(self) -> str:
        """Returns cpu or cuda. Raises ConfigError if the device is not available."""
        import torch

        require(
            self.device != "cuda" or torch.cuda.is_available(),
            "device=cuda but no CUDA device is visible: use device=cpu, or check the driver",
        )
        return "cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu"

    def run(self, log: Callable[[str], None]) -> Findings:
        """Measures and returns the findings. `log` prints a line of progress. Raises BenchError."""
        raise NotImplementedError
