"""The reference of options: each field of a spec with its type, default and attribute docstring.

A spec documents a field by the string literal below it:

    workers: int = 2
    \"\"\"Loader processes per rank. 0 loads in the training process.\"\"\"

Python keeps no such string at run time, so this module parses the source. `--help KEY` prints the result.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from string import Template
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict

from clipx.config.registry import CONF_DIR, MISSING
from clipx.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a configuration."""

    key: str
    type: str
    value: str
    """Value as it is typed on the command line; `???` if the user has to set it."""
    doc: str
    option: str | None = None
    """`group=option` of the option that has the key, if the composed configuration selects another one."""

    def is_under(self, key: str) -> bool:
        """Returns whether this is a key, or one below it."""
        return self.key == key or self.key.startswith(f"{key}.")

    def text(self, width: int) -> str:
        """Returns the entry as lines of at most `width` columns."""
        facts = [self.type, *(["required"] if self.value == MISSING else []), *([self.option] if self.option else [])]
        value = "" if self.value == MISSING else f"={self.value}"
        body = textwrap.fill(self.doc, width, initial_indent="    ", subsequent_indent="    ")
        return f"{self.key}{value}  ({', '.join(facts)})\n{body}"


def field_docs(cls: type) -> dict[str, str]:
    """Returns the attribute docstring of each documented field of a dataclass, inherited fields included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _docs_of_module(base.__module__).get(base.__qualname__, {})
    return docs


@functools.cache
def _docs_of_module(name: str) -> dict[str, dict[str, str]]:
    """Returns attribute docstrings by class and field."""
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    return {node.name: dict(_documented(node)) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            yield field.target.id, " ".join(below.value.value.split())


def type_name(hint: Any) -> str:
    """Returns the name of a type: the choices of an enumeration, `null` for None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " | ".join(type_name(part) for part in typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " | ".join(str(member.value) for member in hint)
    if typing.get_origin(hint) is not None:
        parts = ", ".join(type_name(part) for part in typing.get_args(hint))
        return f"{typing.get_origin(hint).__name__}[{parts}]"
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))


def entries(cfg: DictConfig, prefix: str = "") -> Iterator[Entry]:
    """Yields each key of a composed configuration, groups before the keys in them, `kind` left out."""
    cls = OmegaConf.get_type(cfg)
    assert dataclasses.is_dataclass(cls)
    yield from _entries(typing.cast("type", cls), cfg, prefix)


def _entries(cls: type, cfg: DictConfig | None, prefix: str) -> Iterator[Entry]:
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for field in dataclasses.fields(cls):
        if field.name == "kind":
            continue
        key, hint, doc = f"{prefix}{field.name}", hints[field.name], docs.get(field.name, "")
        node = None if cfg is None else cfg._get_node(field.name)
        yield Entry(key, type_name(hint), _value(node, field), doc)
        yield from _entries_below(key, hint, node)


def _entries_below(key: str, hint: Any, node: Any) -> Iterator[Entry]:
    """Yields the keys of a field that holds a spec, a list of specs, or specs by name."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(node, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(node)):
        yield from entries(node, f"{key}.")
    elif dataclasses.is_dataclass(hint):
        yield from _entries(typing.cast("type", hint), None, f"{key}.")
    elif origin is dict and dataclasses.is_dataclass(arguments[1]):
        named = [] if not isinstance(node, DictConfig) or node._is_none() else list(node)
        for name in named:
            yield from _entries_below(f"{key}.{name}", arguments[1], node._get_node(name))
        of = typing.cast("type", arguments[1])
        if not named and not _is_base(of):
            yield from _entries(of, None, f"{key}.NAME.")
    elif origin is list and dataclasses.is_dataclass(arguments[0]):
        yield from _entries(typing.cast("type", arguments[0]), None, f"{key}.N.")


def _is_base(cls: type) -> bool:
    """Returns True for the base class of a group, whose options have further fields."""
    return any(f.name == "kind" and f.default == MISSING for f in dataclasses.fields(cls))


def _value(node: Any, field: dataclasses.Field[Any]) -> str:
    """Returns a value as it is typed on the command line. The keys of a spec follow it as entries."""
    if node is None:  # of a class that no configuration holds
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        return str(MISSING) if default is dataclasses.MISSING or dataclasses.is_dataclass(default) else _typed(default)
    if node._is_missing():
        return str(MISSING)
    if OmegaConf.is_config(node):
        typed = OmegaConf.to_container(node, resolve=False)
        return "{…}" if isinstance(typed, dict) and typed else _typed(typed)  # its keys follow
    return _typed(node._value())


def _typed(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return str(value.value)
    return re.sub(r"'", "", str(value)) if isinstance(value, list) else str(value)


def is_group(cfg: DictConfig, key: str) -> bool:
    """Returns whether a key is a group of which a composed configuration holds an option, such as `data`."""
    return key in cfg.hydra.runtime.choices and OmegaConf.select(cfg, key.replace("/", ".")) is not None


def overview(cfg: DictConfig, folders: Sequence[Path]) -> str:
    """Returns the help of a command: its template, with the options of its groups or with all of its keys.

    `cfg` is the composed configuration with Hydra's part, which is removed.
    """
    named = {*cfg.hydra.runtime.choices, *map(str, cfg)}
    groups = [group for group in sorted(named) if group != "hydra" and _options(group, folders)]
    template = Template(cfg.hydra.help.template)
    with open_dict(cfg):
        del cfg["hydra"]
    lines = [f"{group}: {', '.join(_options(group, folders))}" for group in groups]
    keys = "\n\n".join(entry.text(_width()) for entry in entries(cfg))
    return template.safe_substitute(APP_CONFIG_GROUPS="\n".join([*lines, ""]), CONFIG=keys)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 120)


def _options(group: str, folders: Sequence[Path]) -> list[str]:
    return sorted({path.stem for folder in (CONF_DIR, *folders) for path in (folder / group).glob("*.yaml")})


def help_text(cfg: DictConfig, keys: Sequence[str], folders: Sequence[Path]) -> str:
    """Returns what `--help KEY…` prints: each key with type, value and doc, and the keys below it.

    `cfg` is the composed configuration with Hydra's part, which is removed. Raises ConfigError for an unknown key.
    """
    choices = OmegaConf.to_container(cfg.hydra.runtime.choices)
    assert isinstance(choices, dict)
    launcher = cfg.hydra.launcher
    with open_dict(cfg):
        del cfg["hydra"]
    known = list(entries(cfg))
    if dataclasses.is_dataclass(OmegaConf.get_type(launcher)):
        known += entries(launcher, "hydra.launcher.")
    width = _width()
    parts: list[str] = []
    for key in (key.replace("/", ".") for key in keys):
        if (CONF_DIR / key).is_dir() and key in choices:
            parts.append(_group_header(cfg, key, choices[key], folders, width))
        found = [entry for entry in known if entry.is_under(key)] or _elsewhere(key)
        if not found:
            near = get_close_matches(key, [entry.key for entry in known], n=3)
            fix = f"similar keys are {', '.join(near)}" if near else "--cfg job prints all keys"
            raise ConfigError(f"--help {key} names no key of this configuration: {fix}")
        parts += [entry.text(width) for entry in found if entry.key != key or entry.value != "{…}" or len(found) == 1]
    return "\n\n".join(parts)


def _group_header(cfg: DictConfig, group: str, choice: Any, folders: Sequence[Path], width: int) -> str:
    """Describes a group: its options, and the one that is selected."""
    names = ", ".join(_options(group, folders))
    lines = [textwrap.fill(f"Options of {group}: {names}", width, subsequent_indent="    ")]
    node = cfg._get_node(group)
    cls = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
    if dataclasses.is_dataclass(cls):
        about = textwrap.indent(inspect.cleandoc(cls.__doc__ or ""), "    ")
        lines.append(f"{group}={choice}\n{about}")
    return "\n\n".join(lines)


def _elsewhere(key: str) -> list[Entry]:
    """Returns a key's entries in the options of its group that the configuration does not select."""
    launcher = key.startswith("hydra.launcher.")
    prefix = "hydra.launcher." if launcher else f"{key.partition('.')[0]}."
    choice = "hydra/launcher=clipx_" if launcher else f"{prefix[:-1]}="
    found: dict[tuple[str, str, str], Entry] = {}
    group = "launcher" if launcher else prefix[:-1]
    for name, stored in ConfigStore.instance().repo.get("schema", {}).get(group, {}).items():
        cls = OmegaConf.get_type(stored.node)
        for entry in _entries(typing.cast("type", cls), None, prefix):
            if entry.is_under(key):
                option = f"{choice}{name.removesuffix('.yaml')}"
                found[entry.key, option, entry.doc] = dataclasses.replace(entry, option=option)
    return list(found.values())
