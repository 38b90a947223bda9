"""Base of the loggers' options, and the interface of their sinks.

Each logger has one file, with its options and its sink, and one YAML file in conf/logger. metrics.jsonl is written in
every run and has no options (`jsonl.py`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Protocol

from clipx.config.registry import MISSING, frozen, kinds
from clipx.errors import require
from clipx.storage.local import write_text

Row = dict[str, float]
"""Row of a log: `step`, `samples`, `epoch`, `seconds`, and the metrics by name."""

COUNTERS = ("step", "samples", "epoch", "seconds")


def id_file(run_dir: Path, kind: str) -> Path:
    """Returns the file in the run directory with the id of the run in a logger, by the kind of the logger.

    A run that is resumed from a URL gets it, too, and continues the same run there.
    """
    return run_dir / f"{kind}_id"


def id_files() -> list[str]:
    """Returns the names of the files with ids, of all loggers."""
    return [id_file(Path(), kind).name for kind in kinds("logger")]


def write_id(run_dir: Path, kind: str, text: str) -> None:
    """Writes the id of the run in a logger to its file. Raises DiskError."""
    write_text(id_file(run_dir, kind), text, f"correct it, or drop {kind}; no step was trained")


class Sink(Protocol):
    """Receiver of metrics."""

    def log(self, row: Row) -> None: ...

    def close(self) -> None: ...


@frozen
class LoggerSpec:
    """Base of the loggers. metrics.jsonl is written in every run and is not an option."""

    kind: str = MISSING
    """Name of the logger. Set by the option: logger=[tensorboard,wandb]; [] for metrics.jsonl alone."""

    def build(self, run_dir: Path, name: str, config: dict[str, Any], step: int) -> Sink:
        """Opens the sink for a run that starts or resumes after `step` steps. Called on rank 0 alone."""
        raise NotImplementedError


def check_name(key: str, text: str) -> None:
    """Raises ConfigError for an empty name in a logger."""
    require(text != "", f"{key}= is empty: give a name, or remove it")


def require_package(module: str, logger: str) -> None:
    """Raises ConfigError if the package of a logger, an extra of clipx of the same name, is not installed."""
    require(
        importlib.util.find_spec(module) is not None,
        f"logger=[{logger}] needs the package {module}: pip install 'clipx[{logger}]', or drop {logger}",
    )
