"""Where numbers go: always metrics.jsonl in the run directory; TensorBoard and Weights & Biases beside it by option."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clipx.config.registry import MISSING, option
from clipx.errors import ConfigError, require

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

Row = dict[str, float]
"""`step`, `samples`, `epoch`, `seconds`, and the metrics by name."""


class Sink(Protocol):
    def log(self, row: Row) -> None: ...

    def close(self) -> None: ...


@dataclass(kw_only=True, slots=True)
class LoggerSpec:
    kind: str = MISSING

    def build(self, run_dir: Path, name: str, config: dict[str, Any], step: int) -> Sink:
        """Opens the sink for a run that starts, or goes on, after `step` steps."""
        raise NotImplementedError


_COUNTERS = ("step", "samples", "epoch", "seconds")


class Jsonl:
    """One JSON object a line. A run that goes on from a checkpoint first drops what it will do again."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [row for row in read_rows(path) if row["step"] <= step]
        if kept or path.exists():
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            temporary.replace(path)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def log(self, row: Row) -> None:
        """Raises OSError where the disk is full; what could not be written is, with the next row."""
        self._unwritten += (json.dumps(row) + "\n").encode()
        self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        if self._unwritten:
            self._file.write(self._unwritten)
        self._file.close()


class Sinks:
    """Several sinks as one. None of them may end a run: its failure is told once for as long as it lasts."""

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
        except Exception as error:  # each library has its own
            if name in self._failing:
                return
            self._failing.add(name)
            message = f"{name} takes no numbers ({type(error).__name__}: {error}): the run goes on without it"
            log.warning(message)
            with contextlib.suppress(OSError):  # the same disk, perhaps
                self._event("logger_failed", logger=name, message=message)


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl. A last line that was cut short is left out."""
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


@option("logger")
@dataclass(kw_only=True, slots=True)
class TensorBoardSpec(LoggerSpec):
    """Scalars by step under <run>/tensorboard: `tensorboard --logdir outputs`."""

    kind: str = "tensorboard"

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
    """Weights & Biases. A run that goes on is the same run there."""

    kind: str = "wandb"
    project: str = "clipx"
    entity: str | None = None
    mode: str = "online"  # online, or offline (files under <run>/wandb, sent later by `wandb sync`)
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(
            self.mode in ("online", "offline"),
            f"logger.wandb.mode={self.mode} is not a mode: choose from online, offline; leave wandb out with logger=[]",
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
