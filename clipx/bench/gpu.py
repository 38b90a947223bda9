"""One GPU in calls of 9 minutes: steps against open_clip, kernels, resume, loss, checkpoints, loader, a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from clipx.bench.spec import BenchSpec, Findings, Table
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.bench.gpu_parts.process import Record

_STEPS = "clipx.bench.gpu_parts.steps:run"


@dataclass(frozen=True)
class GpuPart:
    """Part of the benchmark: a function, in a process with a time limit."""

    function: str  # module:name
    limit_s: float
    args: tuple[Any, ...] = ()


# In order of information: what does not fit into the time is left out. One part fits into a call of 9 minutes. The
# first variant of clipx and of open_clip are measured first: their ratio is the third number of a part of steps.
PARTS = {
    "vit_b32": GpuPart(
        _STEPS, 520, ("vit_b32", 2048, ("compiled", "bf16", "padded", "eager", "loss compiled"), ("compiled",))
    ),
    "kernels": GpuPart("clipx.bench.gpu_parts.kernels:run", 150),
    "resume": GpuPart("clipx.bench.gpu_parts.runs:resume", 150),
    "vit_l14": GpuPart(_STEPS, 480, ("vit_l14", 384, ("compiled", "bf16", "float8", "selective"), ("compiled",))),
    "run": GpuPart("clipx.bench.gpu_parts.runs:profiled", 150),
    "checkpoint": GpuPart("clipx.bench.gpu_parts.storage:save", 120),
    "vit_b32_small": GpuPart(_STEPS, 300, ("vit_b32", 256, ("compiled", "eager"), ("compiled", "eager"))),
    "loss": GpuPart("clipx.bench.gpu_parts.loss:run", 120),
    "vit_b16": GpuPart(_STEPS, 300, ("vit_b16", 1024, ("compiled", "bf16"), ("compiled",))),
    "images": GpuPart("clipx.bench.gpu_parts.storage:images", 180),
    "vit_h14": GpuPart(_STEPS, 400, ("vit_h14", 192, ("compiled", "bf16"), ("compiled",))),
}


@register("bench")
@frozen
class GpuSpec(BenchSpec):
    """All measurements on one GPU, in parts that each run in a process under a time limit.

    Numbers are written when they are measured. The same command with the same run_dir continues: repeat it until
    nothing is missing. Remove parts/NAME.json* in run_dir to measure a part again.
    """

    kind: str = "gpu"
    """Name of this benchmark in the registry."""

    minutes: float = option(9.0, gt=0)
    """Time of this call in minutes. A part that would exceed it is interrupted, and the next call continues it
    with what is missing. The default suits machines that end a command after 10 minutes."""

    parts: list[str] = option([], choices=tuple(PARTS))
    """Parts to measure, in this order, except those that have results. []: all, in order of information."""

    tiny: bool = False
    """Tries all parts with tiny models on the CPU. The numbers mean nothing."""

    resumable: ClassVar[bool] = True

    def __post_init__(self) -> None:
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
            if Record.path(folder, name).is_file():
                log(f"{name}: measured before")
                continue
            left = end - time.monotonic()
            if left < min(20.0, 6 * self.minutes):
                break
            measure(name, PARTS[name], folder, device, self.seed, self.tiny, left, log)
        missing = [name for name in self.parts or PARTS if not Record.path(folder, name).is_file()]
        if missing:
            log(f"missing: {', '.join(missing)}. The same command with run_dir={self.run_dir} continues")
        return self._findings([record for name in PARTS if (record := Record.read(folder, name))], missing)

    def _cuda(self) -> str:
        """Returns cuda. Raises ConfigError without a CUDA device."""
        require(
            self.device != "cpu",
            "device=cpu: this benchmark measures a GPU: use clipx.bench step, or tiny=true for a dry run",
        )
        import torch

        require(
            torch.cuda.device_count() > 0,
            "this benchmark measures a GPU, and no CUDA device is visible: check the driver and CUDA_VISIBLE_DEVICES, "
            "or add tiny=true for a dry run on the CPU",
        )
        return "cuda"

    def _findings(self, records: list[Record], missing: list[str]) -> Findings:
        import torch

        title = "dry run: the numbers mean nothing" if self.tiny else f"results on {torch.cuda.get_device_name()}"
        table = Table(title, ("part", "number", "value", "unit"))
        numbers: dict[str, float] = {}
        for record in records:
            for entry in record.entries:
                if "error" in entry:
                    table.rows.append((record.part, entry["name"], "failed", entry["error"][:60]))
                elif "name" in entry:
                    numbers[entry["name"]] = entry["value"]
                    table.rows.append((record.part, entry["name"], f"{entry['value']:,.4g}", entry["unit"]))
            if record.status != "done":
                table.rows.append((record.part, record.status, "", "see the log of the part"))
        figures = {
            "device": "cpu" if self.tiny else torch.cuda.get_device_name(),
            "tiny": self.tiny,
            "parts": {record.part: record.status for record in records},
            "seconds": {record.part: record.seconds for record in records},
            "missing": missing,
            "ratios": {number: value for number, value in numbers.items() if number.endswith("clipx / open_clip")},
        }
        steps = [entry["step"] for record in records for entry in record.entries if "step" in entry]
        return Findings(figures, {"steps": steps, "parts": [asdict(record) for record in records]}, [table])
