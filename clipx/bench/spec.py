"""Benchmarks: one file and one YAML each, `python -m clipx.bench <name> [key=value …]`.

A benchmark measures clipx and another implementation side by side, in the same run and on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clipx.bench.findings import Findings
from clipx.config.registry import MISSING
from clipx.errors import ClipxError, require


class BenchError(ClipxError):
    """A measurement that cannot be trusted or could not be made."""


@dataclass(kw_only=True, slots=True)
class BenchSpec:
    """The base of all benchmarks' options."""

    kind: str = MISSING
    run_dir: str = MISSING  # results.json and the picture are written here
    device: str = "auto"  # auto (cuda where there is one), cpu, cuda
    threads: int = 0  # of all processes that run at the same time; 0: as many as there are cores
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            self.device in ("auto", "cpu", "cuda"),
            f"device={self.device} is not a device: choose from auto, cpu, cuda",
        )
        require(self.threads >= 0, f"threads={self.threads} must be 0, for as many as there are cores, or more")

    def check_counts(self, *keys: str) -> None:
        """Raises ConfigError where the number of a key is less than 1."""
        for key in keys:
            count = getattr(self, key)
            require(count >= 1, f"{key}={count} must be at least 1")

    def device_type(self) -> str:
        """cpu or cuda. Raises ConfigError where the device is not there."""
        import torch

        require(
            self.device != "cuda" or torch.cuda.is_available(),
            "device=cuda but no CUDA device is visible: use device=cpu, or check the driver",
        )
        return "cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu"

    def run(self, log: Callable[[str], None]) -> Findings:
        """Measures. `log` shows a line of progress. Raises BenchError."""
        raise NotImplementedError
