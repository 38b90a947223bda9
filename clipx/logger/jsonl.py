"""metrics.jsonl: the metrics of a run as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clipx.logger.spec import COUNTERS, Row
from clipx.storage.jsonl import read_objects, set_aside


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


def read_rows(path: Path) -> list[Row]:
    """Returns the readable rows of a metrics.jsonl. Empty if there is no file."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Row], int]:
    """Returns the readable rows and the number of damaged lines. A row has all counters, and values are numbers."""
    rows: list[Row] = []
    objects, damaged = read_objects(path)
    for values in objects:
        row = {name: value for name, value in values.items() if _is_number(value)}
        complete = all(math.isfinite(row.get(name, math.nan)) for name in COUNTERS)
        if complete:
            rows.append(row)
        damaged += not complete or len(row) < len(values)
    return rows, damaged


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)
