"""JSON Lines that remain readable after a process was killed, or the disk was full, while it wrote one."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

_LAST = re.compile(rb".*(?<!: )(\{.*)")  # the last object of a line that is no value of another one


def read_objects(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file in order. Empty if there is no file, and for a named pipe.

    Skips incomplete lines. If a later process appended to one, the last object of the joined line is returned.
    """
    content = path.read_bytes() if path.is_file() else b""
    return [found for found in map(parse_line, content.split(b"\n")) if found is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line as `read_objects`, or None without one."""
    last = _LAST.match(line)  # not searched: each start would scan the rest of a long line
    for text in (line, *(last.groups() if last else ())):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(text), dict):
                return found
    return None
