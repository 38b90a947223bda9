"""Pause of the training for a checkpoint: clipx compared with a copy, torch.save and asynchronous DCP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.bench.processes import Processes
from clipx.bench.spec import BenchSpec, Findings, Table, medians, ratio, rounded
from clipx.config.options import option
from clipx.config.registry import frozen, register

if TYPE_CHECKING:
    from clipx.bench.saving import SaveTiming

_LABELS = {
    "clipx": "clipx, in the background",
    "copy": "one copy in memory",
    "torch_save": "torch.save",
    "dcp_async": "torch.distributed.checkpoint.async_save",
}


@register("bench")
@frozen
class CheckpointBenchSpec(BenchSpec):
    """Pause of the training for a checkpoint of a model and AdamW in float32.

    One process writes files below `run_dir`, which are removed afterwards.
    """

    kind: str = "checkpoint"
    """Name of this benchmark in the registry."""

    parameters: int = option(150_000_000, ge=1)
    """Number of parameters of the model. The state has three times as many numbers. The default is
    ViT-B-32."""

    repeats: int = option(5, ge=1)
    """Number of rounds, in each of which all implementations save in turns. One warm-up round is added."""

    def run(self, log: Callable[[str], None]) -> Findings:
        from clipx.bench import saving

        device = self.device_type()
        size = 12 * self.parameters
        log(f"{size / 1e9:.3g} GB on {device}, {self.repeats} rounds of {', '.join(_LABELS)}")
        folder = Path(self.run_dir) / "checkpoints"
        timings: dict[str, list[SaveTiming]] = Processes(device, self.threads).run(
            saving.race, str(folder), self.parameters, self.repeats, self.seed
        )
        counted = {name: found[1:] for name, found in timings.items()}
        stalls = {name: [timing.stall for timing in found] for name, found in counted.items()}
        typical = {
            what: medians({name: [getattr(timing, what) for timing in found] for name, found in counted.items()})
            for what in ("stall", "total", "slowdown")
        }
        figures: dict[str, Any] = {
            "device": device,
            "bytes": size,
            **{
                f"stall_ratio{end}": rounded(ratio(stalls["clipx"], stalls[name]))
                for name, end in (("copy", "_copy"), ("torch_save", ""), ("dcp_async", "_dcp_async"))
            },
            "stall_seconds": typical["stall"],
            "first_stall_seconds": {name: rounded(found[0].stall) for name, found in timings.items()},
            "total_seconds": typical["total"],
            "slowdown": typical["slowdown"],
        }
        details = {name: [asdict(timing) for timing in found] for name, found in timings.items()}
        return Findings(figures, {"laps": details}, [self._table(figures)])

    def _table(self, figures: dict[str, Any]) -> Table:
        table = Table(
            f"checkpoint of {figures['bytes'] / 1e9:.3g} GB",
            ("", "pause of training, s", "first pause, s", "until on disk, s", "step time meanwhile, relative"),
        )
        for name, label in _LABELS.items():
            keys = ("stall_seconds", "first_stall_seconds", "total_seconds", "slowdown")
            table.rows.append((label, *(f"{figures[key][name]:.3g}" for key in keys)))
        return table
