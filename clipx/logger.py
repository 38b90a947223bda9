"""Metric loggers: metrics.jsonl in the run directory in every run; TensorBoard and Weights & Biases as options."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clipx.config.registry import MISSING, option
from clipx.errors import ConfigError, require
from clipx.storage.jsonl import read_objects, set_aside

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

Row = dict[str, float]
"""Row of a log: `step`, `samples`, `epoch`, `seconds`, and the metrics by name."""


class Sink(Protocol):
    """Receiver of metrics."""

    def log(self, row: Row) -> None: ...

    def close(self) -> None: ...


@dataclass(kw_only=True, slots=True)
class LoggerSpec:
    """Base of the loggers. metrics.jsonl is written in every run and is not an option."""

    kind: str = MISSING
    """Name of the logger. Set by the option: logger=[tensorboard,wandb]; [] for metrics.jsonl alone."""

    def build(self, run_dir: Path, name: str, config: dict[str, Any], step: int) -> Sink:
        """Opens the sink for a run that starts or resumes after `step` steps."""
        raise NotImplementedError


_COUNTERS = ("step", "samples", "epoch", "seconds")


class Jsonl:
    """Writes one JSON object per line. A resumed run first drops the rows of the steps that it will repeat.

    Damaged lines are dropped, too; a copy of the damaged file remains, and `report(kind, message)` is called.
    """

    def __init__(self, path: Path, step: int, report: Callable[[str, str], None] = lambda kind, message: None) -> None:
        rows, damaged = _read(path)
        earlier = [row for row in rows if row["step"] <= step]
        if damaged:
            report(
                "metrics_damaged",
                f"{path} has {damaged:,} damaged line{'s' * (damaged > 1)}, dropped now; the {len(earlier):,} readable "
                f"rows up to step {step:,} are kept, and the damaged file is copied to {set_aside(path).name}",
            )
        if path.exists():
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in earlier), encoding="utf-8")
            temporary.replace(path)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def log(self, row: Row) -> None:
        """Writes a row. Raises OSError if the disk is full; the unwritten part is written with the next row."""
        self._unwritten += (json.dumps(row) + "\n").encode()
        self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        if self._unwritten:
            self._file.write(self._unwritten)
        self._file.close()


class Sinks:
    """Sink that forwards to several sinks. A failing sink does not end the run: it is reported once per failure."""

    def __init__(self, sinks: Sequence[Sink], event: Callable[..., None]) -> None:
        self._sinks, self._event = sinks, event
        self._failing: set[str] = set()

    def log(self, row: Row) -> None:
        for sink in self._sinks:
            self._try(sink, lambda sink=sink: sink.log(row))  # type: ignore[misc]

    def close(self) -> None:
        for sink in self._sinks:
            self._try(sink, sink.close)

    def _try(self, sink: Sink, call: Callable[[], None]) -> None:
        name = type(sink).__name__.strip("_").lower()
        try:
            call()
            self._failing.discard(name)
        except Exception as error:  # each library raises different errors
            if name in self._failing:
                return
            self._failing.add(name)
            message = f"{name} failed to log metrics ({type(error).__name__}: {error}): the run continues without it"
            log.warning(message)
            with contextlib.suppress(OSError):  # events.jsonl may be on the same disk
                self._event("logger_failed", logger=name, message=message)


def read_rows(path: Path) -> list[Row]:
    """Returns the readable rows of a metrics.jsonl. Empty if there is no file."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Row], int]:
    """Returns the readable rows and the number of damaged lines. A row has all counters, and values are numbers."""
    rows: list[Row] = []
    objects, damaged = read_objects(path)
    for values in objects:
        row = {name: value for name, value in values.items() if _is_number(value)}
        complete = all(math.isfinite(row.get(name, math.nan)) for name in _COUNTERS)
        if complete:
            rows.append(row)
        damaged += not complete or len(row) < len(values)
    return rows, damaged


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


@option("logger")
@dataclass(kw_only=True, slots=True)
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
            if name not in _COUNTERS:
                self._writer.add_scalar(name, value, int(row["step"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@option("logger")
@dataclass(kw_only=True, slots=True)
class WandbSpec(LoggerSpec):
    """Logs to Weights & Biases. A resumed run continues the same run there."""

    kind: str = "wandb"
    """Name of this logger, selected by logger=[wandb]. The key itself cannot be set."""

    project: str = "clipx"
    """Project on Weights & Biases."""

    entity: str | None = None
    """User or team of the project on Weights & Biases. null: the default entity of the account."""

    mode: str = "online"
    """`online`: sends metrics during the run; needs `wandb login` or WANDB_API_KEY. `offline`: writes files under
    <run>/wandb, to be sent later by `wandb sync`."""

    tags: list[str] = field(default_factory=list)
    """Tags of the run on Weights & Biases."""

    notes: str | None = None
    """Notes of the run on Weights & Biases, a text. null: none."""

    def __post_init__(self) -> None:
        require(
            self.mode in ("online", "offline"),
            f"logger.wandb.mode={self.mode} is not a mode: choose online or offline, or drop wandb by logger=[]",
        )

    def build(self, run_dir: Path, name: str, config: dict[str, Any], step: int) -> Sink:
        import wandb

        if self.mode == "online" and not (os.environ.get("WANDB_API_KEY") or _has_netrc()):
            raise ConfigError(
                "logger.wandb.mode=online needs a key: run `wandb login`, set WANDB_API_KEY, or use "
                "logger.wandb.mode=offline"
            )
        id_file = run_dir / "wandb_id"
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:8])
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=name,
            id=id_file.read_text().strip(),
            resume="allow",
            mode="offline" if self.mode == "offline" else "online",
            dir=str(run_dir),
            tags=self.tags or None,
            notes=self.notes,
            config=config,
        )
        return _Wandb(run)


def _has_netrc() -> bool:
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    return netrc.is_file() and "wandb" in netrc.read_text(errors="replace")


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if k != "step"}, step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()
