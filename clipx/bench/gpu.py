"""One GPU in 25 minutes: kernels, resume, whole steps against open_clip, loss, checkpoints, loader, a profiled run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from clipx.bench.findings import Findings, Table
from clipx.bench.spec import BenchSpec
from clipx.config.registry import option
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.bench.gpu_parts.process import Record

_STEPS = "clipx.bench.gpu_parts.steps:run"


@dataclass(frozen=True)
class Part:
    """Part of the benchmark: a function, in a process with a time limit."""

    function: str  # module:name
    limit_s: float
    args: tuple[Any, ...] = ()


# In order of information: what does not fit into the time is left out.
PARTS = {
    "kernels": Part("clipx.bench.gpu_parts.kernels:run", 150),
    "resume": Part("clipx.bench.gpu_parts.runs:resume", 150),
    "vit_b32": Part(
        _STEPS, 300, ("vit_b32", 2048, ("compiled", "bf16", "padded", "eager", "loss compiled"), ("compiled", "eager"))
    ),
    "vit_l14": Part(_STEPS, 300, ("vit_l14", 384, ("compiled", "bf16", "float8", "selective"), ("compiled",))),
    "vit_b16": Part(_STEPS, 200, ("vit_b16", 1024, ("compiled", "bf16"), ("compiled",))),
    "loss": Part("clipx.bench.gpu_parts.loss:run", 120),
    "vit_b32_small": Part(_STEPS, 150, ("vit_b32", 256, ("compiled", "eager"), ("compiled",))),
    "checkpoint": Part("clipx.bench.gpu_parts.storage:save", 120),
    "run": Part("clipx.bench.gpu_parts.runs:profiled", 150),
    "images": Part("clipx.bench.gpu_parts.storage:images", 180),
    "vit_b32_large": Part(_STEPS, 150, ("vit_b32", 4096, ("compiled", "bf16"), ("compiled",))),
    "vit_h14": Part(_STEPS, 150, ("vit_h14", 192, ("bf16",), ("compiled",))),
}


@option("bench")
@dataclass(kw_only=True, slots=True)
class GpuSpec(BenchSpec):
    """All measurements on one GPU, in parts that each run in a process under a time limit.

    Results are written after each part. The same command with the same run_dir continues with the parts that are
    missing.
    """

    kind: str = "gpu"
    """Name of this benchmark in the registry."""

    minutes: float = 25.0
    """Time of this call in minutes, above 0. A part that would exceed it is stopped, and later ones are left out."""

    parts: list[str] = field(default_factory=list)
    """Parts to measure, again if they have results. []: all that have none, in order of information."""

    tiny: bool = False
    """Tries all parts with tiny models on the CPU. The numbers mean nothing."""

    resumable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        require(self.minutes > 0, f"minutes={self.minutes:g} must be above 0")
        for name in self.parts:
            require(name in PARTS, f"parts={name} is not a part: choose from {', '.join(PARTS)}")
        require(
            not self.tiny or self.device != "cuda",
            "tiny=true is a dry run on the CPU: remove device=cuda",
        )

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench.gpu_parts.process import Record, measure

        device = "cpu" if self.tiny else self._cuda()
        folder = Path(self.run_dir)
        end = time.monotonic() + 60 * self.minutes
        for name in self.parts or PARTS:
            if not self.parts and Record.path(folder, name).is_file():
                log(f"{name}: measured before")
                continue
            left = end - time.monotonic()
            if left < min(20.0, 6 * self.minutes):
                log(f"{name}: no time left. The same command with run_dir={self.run_dir} continues here")
                break
            measure(name, PARTS[name], folder, device, self.seed, self.tiny, left, log)
        return self._findings([Record.read(folder, name) for name in PARTS if Record.path(folder, name).is_file()])

    def _cuda(self) -> str:
        """Returns cuda. Raises ConfigError without a CUDA device."""
        import torch

        require(
            self.device != "cpu",
            "device=cpu: this benchmark measures a GPU: use clipx.bench step, or tiny=true for a dry run",
        )
        require(
            torch.cuda.device_count() > 0,
            "this benchmark measures a GPU, and no CUDA device is visible: check the driver and CUDA_VISIBLE_DEVICES, "
            "or add tiny=true for a dry run on the CPU",
        )
        return "cuda"

    def _findings(self, records: list[Record]) -> Findings:
        from clipx.bench.gpu_parts.expected import expectation

        table = Table("results", ("part", "number", "value", "unit", "expected on H200", "act if", "verdict"))
        numbers: dict[str, float] = {}
        for record in records:
            for entry in record.entries:
                if "error" in entry:
                    table.rows.append((record.part, entry["name"], "failed", "", "", "", entry["error"][:60]))
                elif "name" in entry:
                    name, value = entry["name"], entry["value"]
                    numbers[name] = value
                    known = expectation(name)
                    hopes = ("", "", "") if known is None else (known.range, known.threshold, known.verdict(value))
                    table.rows.append((record.part, name, f"{value:,.4g}", entry["unit"], *hopes))
            if record.status != "done":
                table.rows.append((record.part, "", record.status, "", "", "", "see the log of the part"))
        figures = {
            "device": "cpu" if self.tiny else "cuda",
            "tiny": self.tiny,
            "parts": {record.part: record.status for record in records},
            "seconds": {record.part: record.seconds for record in records},
            "missing": [name for name in PARTS if name not in {record.part for record in records}],
            "ratios": {name: value for name, value in numbers.items() if name.endswith("clipx / open_clip")},
        }
        steps = [entry["step"] for record in records for entry in record.entries if "step" in entry]
        return Findings(figures, {"steps": steps, "parts": [asdict(record) for record in records]}, [table])
