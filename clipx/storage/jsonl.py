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
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        for text in (line, *_LAST.findall(line)):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(text)
                found += [value] if isinstance(value, dict) else []
                break
    return found
