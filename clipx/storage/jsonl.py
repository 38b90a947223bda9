"""JSON Lines that remain readable after damage: a flipped bit, a torn write, zeros after a power failure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_FLAT = re.compile(rb"\{[^{}]*\}")  # an object without objects inside


def read_objects(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the objects of a file in order, and its number of damaged lines. Empty if there is no file.

    Of a damaged line the objects that can be read are returned: a damaged line end joins two lines. An incomplete last
    line is no damage, since a process may be writing it.
    """
    *lines, last = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    found: list[dict[str, Any]] = []
    damaged = 0
    for line in lines:
        value = _object(line)
        if value is not None:
            found.append(value)
        elif line:
            damaged += 1
            found += [value for part in _FLAT.findall(line) if (value := _object(part)) is not None]
    if (value := _object(last)) is not None:
        found.append(value)
    return found, damaged


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def set_aside(path: Path) -> Path:
    """Copies a damaged file to <name>.damaged, or <name>.damaged.N if that exists, and returns the path of the copy."""
    number, content = 0, path.read_bytes()
    while True:
        copy = path.with_name(f"{path.name}.damaged{f'.{number}' if number else ''}")
        try:
            with copy.open("xb") as file:
                file.write(content)
            return copy
        except FileExistsError:
            number += 1
