"""Rules for names that become a part of a path, a metric name or a label of a figure."""

from __future__ import annotations

import re
from pathlib import Path

from clipx.errors import require
from clipx.escape import escaped

_LONGEST = 200  # bytes; file systems allow 255, and names get prefixes and suffixes


def check_name(key: str, name: str) -> None:
    """Raises ConfigError unless `name` is a single part of a path: not a path, without control characters."""
    shown = escaped(name)
    check_text(key, name.strip())
    is_part = "/" not in name and name not in (".", "..")
    fix = "write it without /; run_dir=… sets the directory"
    require(is_part, f"{key}={shown} is a path, and a name is one part of a path: {fix}")
    length = len(name.encode())
    require(length <= _LONGEST, f"{key}={name[:40]}… has {length} bytes, and a name at most {_LONGEST}: shorten it")


def check_text(key: str, text: str) -> None:
    """Raises ConfigError unless `text` is not empty and printable."""
    require(bool(text), f"{key}= is empty: give a value, or remove it")
    require(escaped(text) == text, f"{key}={escaped(text)} contains an unprintable character: remove it")


def check_metric_part(key: str, name: str) -> None:
    """Raises ConfigError unless `name`, a key of a dictionary of options, can be a part of metric names."""
    require(
        re.fullmatch(r"\w[\w.-]{0,99}", name) is not None,
        f"{key} becomes a part of metric names: use at most 100 letters, digits, - and _",
    )


def name_of(location: str) -> str:
    """Returns a name for the file or folder at a path or URL: its last part, without special characters."""
    part = location.rstrip("/").rpartition("/")[2]
    if part in ("", ".", ".."):
        part = Path(location).resolve().name
    return re.sub(r"[^\w.-]+", "-", part)[-100:] or "unnamed"
