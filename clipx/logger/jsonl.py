"""metrics.jsonl: the metrics of a run as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from clipx.logger.spec import Row
from clipx.storage.jsonl import read_objects


class Jsonl:
    """Writes one JSON object per line. A resumed run first drops the rows of the steps that it will repeat."""

    def __init__(self, path: Path, step: int) -> None:
        earlier = [row for row in read_rows(path) if row["step"] <= step]
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


def read_rows(path: Path) -> list[Row]:
    """Returns the complete rows of a metrics.jsonl. Empty if there is no file."""
    return read_objects(path)
