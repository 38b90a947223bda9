"""`@frozen`: the decorator of specs, dataclasses that do not change."""

from __future__ import annotations

import dataclasses
import typing
from types import MemberDescriptorType
from typing import Any, TypeVar

T = TypeVar("T")


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen(cls: type[T]) -> type[T]:
    """Class decorator: a dataclass with keyword arguments and slots, whose attributes are set once.

    A later assignment raises `dataclasses.FrozenInstanceError`, and mypy reports it: use `dataclasses.replace`, or
    `complete` in `__post_init__`. The same holds for subclasses of any kind. `dataclass(frozen=True)` has read-only
    nodes in OmegaConf, into which it merges no overrides.
    """
    if not hasattr(cls, "__post_init__"):
        cls.__post_init__ = _nothing  # type: ignore[attr-defined]
    made = dataclasses.dataclass(kw_only=True, slots=True)(cls)
    for name, method in (("__setattr__", _set_once), ("__delattr__", _refuse)):
        setattr(made, name, method)
    return made


def complete(spec: Any, **values: Any) -> None:
    """Sets attributes in the `__post_init__` of a spec: a default that depends on other keys, or the usual form of a
    value."""
    for name, value in values.items():
        object.__setattr__(spec, name, value)


def _nothing(self: Any) -> None:
    """The `__post_init__` of a spec without further checks, which subclasses may call and `register` extends."""


def _set_once(spec: Any, name: str, value: Any) -> None:
    """Sets an attribute that has no value yet: `__init__`, pickle and copy set each of them once."""
    slot = isinstance(getattr(type(spec), name, None), MemberDescriptorType)
    if hasattr(spec, name) if slot else name in getattr(spec, "__dict__", ()):  # a plug-in's class may have no slots
        _refuse(spec, name)
    object.__setattr__(spec, name, value)


def _refuse(spec: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"{type(spec).__name__}.{name} is set: use dataclasses.replace")
