"""trackio: metrics in trackio's local database, without a server."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clipx.config.registry import frozen, option, register
from clipx.config.saved import flatten
from clipx.errors import ConfigError, require
from clipx.logger.spec import LoggerSpec, Row, Sink, check_name, id_file, require_package, write_id

log = logging.getLogger(__name__)


@register("logger")
@frozen
class TrackioSpec(LoggerSpec):
    """Logs to trackio's local database, in TRACKIO_DIR or trackio's cache folder. A resumed run continues the same run
    there. View it by `trackio show`."""

    kind: str = "trackio"
    """Name of this logger, selected by logger=[trackio]. The key itself cannot be set."""

    project: str = option("clipx", check=check_name)
    """Project in trackio that contains the run."""

    def build(self, run_dir: Path, name: str, config: dict[str, Any], step: int) -> Sink:
        require_package("trackio", "trackio")
        import trackio

        for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            require(
                not os.environ.get(variable),
                f"logger=[trackio] writes the local database, and {variable} names a server: unset it; `trackio sync` "
                "uploads a project later",
            )
        with _quiet():
            try:
                run = trackio.init(
                    project=self.project,
                    name=_name(run_dir, self.project, name),
                    config=dict(flatten(config)),
                    resume="allow",
                    embed=False,  # no dashboard in a notebook
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
            except ValueError as error:
                raise ConfigError(f"logger.trackio.project={self.project} is refused by trackio: {error}") from None
        return _Trackio(run)


def _name(run_dir: Path, project: str, name: str) -> str:
    """Returns the name of the run in trackio, which identifies it there: `name`, with a number if it is taken."""
    import trackio

    stored = id_file(run_dir, "trackio")
    if stored.is_file():
        _import_fragments()
    else:
        with contextlib.suppress(ValueError):  # a new project
            taken = {run.name for run in trackio.Api().runs(project)}
            name = next(free for free in _numbered(name) if free not in taken)
        write_id(run_dir, "trackio", name)
    return stored.read_text(encoding="utf-8")


def _writes_fragments() -> bool:
    """Returns whether trackio writes files that its dashboard imports later, as it does on network file systems."""
    from trackio.utils import get_storage_mode

    return str(get_storage_mode()) == "jsonl"


def _import_fragments() -> None:
    """Writes the rows of earlier runs into the database, where trackio finds the run that continues."""
    if _writes_fragments():
        from trackio.fragments import import_inbox_dir

        import_inbox_dir()


def _numbered(name: str) -> Iterator[str]:
    yield name
    for number in itertools.count(2):
        yield f"{name}-{number}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Logs what trackio prints, and keeps it from asking the Hugging Face hub for the name of the user."""
    from huggingface_hub import constants

    printed, offline = io.StringIO(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        for line in printed.getvalue().splitlines():
            log.debug(line)


class _Trackio:
    def __init__(self, run: Any) -> None:
        self._run = run
        stored = self._stored()
        self._rows = len(stored)
        self._last = {name: int(row["step"]) for row in stored for name in row}  # newest step of a metric

    def _stored(self) -> list[dict[str, Any]]:
        """Returns the rows of the run in the database, in order."""
        from trackio.sqlite_storage import SQLiteStorage

        rows = SQLiteStorage.get_logs(self._run.project, self._run.name, run_id=self._run.id)
        return sorted(rows, key=lambda row: int(row["step"]))

    def log(self, row: Row) -> None:
        step = int(row["step"])  # a resumed run repeats steps that are logged already
        new = {name: value for name, value in row.items() if name != "step" and step > self._last.get(name, -1)}
        if new:
            self._run.log(new, step=step)
            self._rows += 1

    def close(self) -> None:
        """Writes the rows that trackio's thread has not written yet, and raises an error if one is missing.

        trackio itself raises none: it warns, and drops the rows that it could not write.
        """
        from trackio import context_vars

        with _quiet():
            self._run.finish()
        if context_vars.current_run.get() is self._run:
            context_vars.current_run.set(None)  # or trackio finishes the run again at the end of the process
        missing = 0 if _writes_fragments() else self._rows - len(self._stored())
        if missing > 0:
            raise OSError(f"{missing:,} of {self._rows:,} rows are not in trackio's database")
