"""Nested lists and objects: the places of their values, and copies with another value at a place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each value, the whole first."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Returns a copy with `new` at `path`."""
    if not path:
        return copy.deepcopy(new)
    found = copy.deepcopy(value)
    parent = found
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = copy.deepcopy(new)
    return found
