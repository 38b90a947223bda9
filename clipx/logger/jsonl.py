"""metrics.jsonl: the metrics of a run as JSON lines."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from clipx.errors import disk_error
from clipx.logger.spec import Row
from clipx.storage.jsonl import read_objects
from clipx.storage.local import open_own, write_text

log = logging.getLogger(__name__)

_FIX = "correct it; the run's files are unchanged"


class Jsonl:
    """Writes one JSON object per line. A resumed run first drops the rows of the steps that it will repeat."""

    def __init__(self, path: Path, step: int) -> None:
        earlier = [row for row in read_rows(path) if row["step"] <= step]
        if path.exists():
            write_text(path, "".join(json.dumps(row) + "\n" for row in earlier), _FIX)
        try:
            self._file = open_own(path, "ab", buffering=0)
        except OSError as error:
            raise disk_error(error, path, _FIX) from None
        self._path = path
        self._unwritten = b""

    def log(self, row: Row) -> None:
        """Writes a row. Raises OSError if the disk is full, or the file was removed: the unwritten part is written with
        the next row."""
        self._unwritten += (json.dumps(row) + "\n").encode()
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            self._path.stat()  # a removed file that is open takes all rows
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        """Closes the file, and logs how many rows are lost."""
        with self._file:
            try:
                self._write()
            except OSError as error:
                lost = self._unwritten.count(b"\n")
                log.warning("%s cannot be written (%s): its last %d rows are lost", self._path, error.strerror, lost)


def read_rows(path: Path) -> list[Row]:
    """Returns the complete rows of a metrics.jsonl. Empty if there is no file."""
    return [row for row in read_objects(path) if isinstance(row.get("step"), int | float)]
