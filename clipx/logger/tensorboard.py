"""TensorBoard: event files in the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.config.registry import frozen, register
from clipx.logger.spec import COUNTERS, LoggerSpec, Row, Sink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@register("logger")
@frozen
class TensorBoardSpec(LoggerSpec):
    """Writes scalars by step to <run>/tensorboard. View them by `tensorboard --logdir outputs`."""

    kind: str = "tensorboard"
    """Name of this logger, selected by logger=[tensorboard]. The key itself cannot be set."""

    def build(self, run_dir: Path, name: str, config: dict[str, Any], step: int) -> Sink:
        from torch.utils.tensorboard import SummaryWriter

        return _TensorBoard(SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1))


class _TensorBoard:
    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def log(self, row: Row) -> None:
        for name, value in row.items():
            if name not in COUNTERS:
                self._writer.add_scalar(name, value, int(row["step"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
