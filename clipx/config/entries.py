"""The keys of a configuration, each with its type, value and attribute docstring.

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
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from clipx.config.options import default_of, facts, typed
from clipx.config.registry import LIST_GROUPS, MISSING, kinds, option_files

# Fields that select a class: a user chooses the option instead; and the overrides of a run: a user gives its keys.
SET_BY_CLIPX = ("kind", "_target_", "changes")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a configuration."""

    key: str
    type: str
    value: str
    """Value as it is typed on the command line; `???` if the user has to set it."""
    doc: str
    rules: tuple[str, ...] = ()
    """Bounds, unit and condition of the value."""
    option: str | None = None
    """`group=option` of the option that has the key, if the composed configuration selects another one."""

    def is_under(self, key: str) -> bool:
        """Returns whether this is a key, or one below it."""
        return self.key == key or self.key.startswith(f"{key}.")

    def text(self, width: int) -> str:
        """Returns the entry as lines of at most `width` columns."""
        required = ["required"] if self.value == MISSING else []
        facts = [self.type, *self.rules, *required, *([self.option] if self.option else [])]
        value = "" if self.value == MISSING else f"={self.value}"
        body = textwrap.fill(self.doc, width, initial_indent="    ", subsequent_indent="    ")
        return f"{self.key}{value}  ({'; '.join(facts)})\n{body}"


def entries(cfg: DictConfig, prefix: str = "") -> Iterator[Entry]:
    """Yields each key of a composed configuration, groups before the keys in them, `kind` left out."""
    cls = OmegaConf.get_type(cfg)
    assert dataclasses.is_dataclass(cls)
    yield from spec_entries(typing.cast("type", cls), cfg, prefix)


def unselected_entries(groups: Iterable[str]) -> Iterator[Entry]:
    """Yields the keys of all options of groups, with their options. `hydra.launcher` and `hydra.sweeper` are groups."""
    for group in groups:
        plugin = group.removeprefix("hydra.") if group.startswith("hydra.") else None
        for name, cls in kinds(plugin or group).items():
            if plugin or name in option_files(group):
                option = f"hydra/{plugin}=clipx_{name}" if plugin else f"{group}={name}"
                for entry in spec_entries(cls, None, f"{group}.{name}." if group in LIST_GROUPS else f"{group}."):
                    yield dataclasses.replace(entry, option=option)


def shown_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """Returns the fields of a spec that a user sets."""
    return [field for field in dataclasses.fields(cls) if field.name not in SET_BY_CLIPX]


def spec_entries(cls: type, cfg: DictConfig | None, prefix: str) -> Iterator[Entry]:
    """Yields each key of a spec, with the values of `cfg`; None: with the defaults of the class."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    values = {} if cfg is None else dict(cfg.items_ex(resolve=False))
    for field in shown_fields(cls):
        key, hint, doc = f"{prefix}{field.name}", hints[field.name], docs.get(field.name, "")
        value = values[field.name] if field.name in values else _default(field)
        yield Entry(key, type_name(hint), _written(value), doc, tuple(facts(field)))
        yield from _entries_below(key, hint, value)


def _entries_below(key: str, hint: Any, node: Any) -> Iterator[Entry]:
    """Yields the keys of a field that holds a spec, a list of specs, or specs by name."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(node, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(node)):
        yield from entries(node, f"{key}.")
    elif dataclasses.is_dataclass(hint):
        yield from spec_entries(typing.cast("type", hint), None, f"{key}.")
    elif origin is dict and dataclasses.is_dataclass(arguments[1]):
        named = list(node) if isinstance(node, DictConfig) else []
        for name, value in node.items_ex(resolve=False) if named else ():
            yield from _entries_below(f"{key}.{name}", arguments[1], value)
        of = typing.cast("type", arguments[1])
        if not named and not _is_base(of):
            yield from spec_entries(of, None, f"{key}.NAME.")
    elif origin is list and dataclasses.is_dataclass(arguments[0]):
        yield from spec_entries(typing.cast("type", arguments[0]), None, f"{key}.N.")


def _is_base(cls: type) -> bool:
    """Returns True for the base class of a group, whose options have further fields."""
    return any(f.name == "kind" and f.default == MISSING for f in dataclasses.fields(cls))


def _default(field: dataclasses.Field[Any]) -> Any:
    """Returns the default of a field of a class that no configuration holds; MISSING if it is a spec."""
    default = default_of(field)
    return MISSING if dataclasses.is_dataclass(default) else default


def _written(value: Any) -> str:
    """Returns a value as it is typed on the command line. The keys of a spec follow it as entries."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
        return "{…}" if isinstance(value, dict) and value else typed(value)
    return typed(value)


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
