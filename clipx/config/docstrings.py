"""Attribute docstrings of the fields of specs, and the names of their types.

A spec documents a field by the string literal below it:

    workers: int = 2
    \"\"\"Loader processes per rank. 0 loads in the training process.\"\"\"

Python keeps no such string at run time, so this module parses the source.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any


def field_docs(cls: type) -> dict[str, str]:
    """Returns the attribute docstring of each documented field of a dataclass, or of each member of an enumeration.

    Fields that a dataclass inherits are included.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base) or base is cls:
            docs |= _docs_of_module(base.__module__).get(base.__qualname__, {})
    return docs


@functools.cache
def _docs_of_module(name: str) -> dict[str, dict[str, str]]:
    """Returns attribute docstrings by class and field."""
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    return {node.name: dict(_documented(node)) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:], strict=False):
        target: ast.expr | None = field.target if isinstance(field, ast.AnnAssign) else None
        if isinstance(field, ast.Assign) and len(field.targets) == 1:  # a member of an enumeration
            target = field.targets[0]
        if (
            isinstance(target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            yield target.id, " ".join(below.value.value.split())


def type_name(hint: Any) -> str:
    """Returns the name of a type: the choices of an enumeration, `null` for None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " | ".join(type_name(part) for part in typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " | ".join(hint.__members__)
    if typing.get_origin(hint) is not None:
        parts = ", ".join(type_name(part) for part in typing.get_args(hint))
        return f"{typing.get_origin(hint).__name__}[{parts}]"
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))
