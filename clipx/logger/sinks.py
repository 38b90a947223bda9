"""The loggers of a run: how their sinks are opened, and the sink that forwards to them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clipx.errors import ClipxError, DataError
from clipx.logger.jsonl import Jsonl
from clipx.logger.spec import LoggerSpec, Row, Sink

log = logging.getLogger(__name__)


def open_sinks(
    loggers: Mapping[str, LoggerSpec],
    run_dir: Path,
    name: str,
    config: dict[str, Any],
    step: int,
    event: Callable[..., None],
) -> Sinks:
    """Opens metrics.jsonl and the loggers that the user asked for. Raises an error if one of them cannot start."""
    built: list[Sink] = [Jsonl(run_dir / "metrics.jsonl", step)]
    for kind, logger in loggers.items():
        try:
            built.append(logger.build(run_dir, name, config, step))
        except Exception as error:  # each library raises different errors
            Sinks(built, event).close()
            if isinstance(error, ClipxError):
                raise
            raise DataError(
                f"logger=[{kind}] cannot start ({_shown(error)}): correct it, or drop {kind}; no step was trained"
            ) from error
    return Sinks(built, event)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Sinks:
    """Sink that forwards to several sinks. A failing sink does not end the run: it is reported once per failure."""

    def __init__(self, sinks: Sequence[Sink], event: Callable[..., None]) -> None:
        self._sinks, self._event = sinks, event
        self._failing: set[str] = set()

    def log(self, row: Row) -> None:
        for sink in self._sinks:
            self._try(sink, lambda sink=sink: sink.log(row))  # type: ignore[misc]

    def close(self) -> None:
        """Closes all sinks. A second call does nothing."""
        for sink in self._sinks:
            self._try(sink, sink.close)
        self._sinks = ()

    def _try(self, sink: Sink, call: Callable[[], None]) -> None:
        name = type(sink).__name__.strip("_").lower()
        try:
            call()
            self._failing.discard(name)
        except Exception as error:  # each library raises different errors
            if name in self._failing:
                return
            self._failing.add(name)
            message = f"{name} failed to log metrics ({_shown(error)}): the run continues without it"
            log.warning(message)
            with contextlib.suppress(OSError):  # events.jsonl may be on the same disk
                self._event("logger_failed", logger=name, message=message)
