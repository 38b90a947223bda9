"""Sink that forwards to the sinks of a run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from clipx.logger.spec import Row, Sink

log = logging.getLogger(__name__)


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
            message = f"{name} failed to log metrics ({type(error).__name__}: {error}): the run continues without it"
            log.warning(message)
            with contextlib.suppress(OSError):  # events.jsonl may be on the same disk
                self._event("logger_failed", logger=name, message=message)
