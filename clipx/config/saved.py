"""Saves a spec as YAML and reads it back."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipx.config.compose import checked, prepare
from clipx.config.messages import one_line
from clipx.config.registry import NESTED_OPTIONS, Spec, spec_class
from clipx.config.renamed import current_name, group_key, removed
from clipx.errors import ConfigError
from clipx.storage.local import write_text

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's is four times as fast


def to_dict(spec: Any) -> dict[str, Any]:
    """Returns the plain values of a spec, for YAML, JSON and loggers.

    Equal to the values of `OmegaConf.structured(spec)`, which take 20 ms for a run: a sweep has a thousand of them.
    """
    return {field.name: _plain(getattr(spec, field.name)) for field in dataclasses.fields(spec)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain(child) for child in value]
    if isinstance(value, Enum):
        return value.name
    return value


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for each leaf of nested dicts."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from flatten(child, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def save(spec: Any, path: Path, fix: str) -> None:
    """Writes a spec as YAML that `from_dict` reads back. `fix`: see `write_text`. Raises DiskError.

    The document is marked at both ends, so that `read_saved` notices one that was cut off.
    """
    marked = {"explicit_start": True, "explicit_end": True}
    write_text(path, yaml.dump(to_dict(spec), Dumper=_DUMPER, sort_keys=False, **marked), fix)


def from_dict(cls: type[Spec], values: dict[str, Any]) -> Spec:
    """Returns the spec of values that `to_dict` returned. The class of each option is found by its `kind`.

    Keys that were renamed later are read under their old names, and removed keys are ignored. Raises ConfigError.
    """
    return typing.cast(Spec, checked(saved_config(cls, values)))


def saved_config(cls: type[Any], values: dict[str, Any]) -> DictConfig:
    """Returns the configuration that `from_dict` checks. Raises ConfigError for keys and values that no spec has."""
    prepare([], [])
    cfg: DictConfig = OmegaConf.structured(cls)
    types = typing.get_type_hints(cls)
    try:
        for key, value in _renamed(cls, values, "").items():
            if isinstance(value, dict) and "kind" in value:
                _set(cfg, key, value, key)
            elif isinstance(value, dict | None) and _holds_options(types.get(key)):
                for name, child in (value or {}).items():
                    _set(cfg[key], name, child, key)
            elif isinstance(value, dict) and dataclasses.is_dataclass(types.get(key)):
                cfg[key].merge_with(value)
            elif isinstance(value, list):  # its items may be specs
                cfg.merge_with({key: value})
            else:
                cfg[key] = value
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error
    return cfg


def removed_values(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the saved values of removed keys with which the specs no longer behave as saved, by key."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if gone := removed(group_key(key), values.keys() - {name}):
            found |= {leaf: saved for leaf, saved in flatten(value, key) if saved != gone.equivalent}
        elif isinstance(value, dict):
            found |= removed_values(value, f"{key}.")
    return found


def option_from_dict(group: str, values: dict[str, Any]) -> Any:
    """Returns an option of a group from its part of a saved configuration. Raises ConfigError."""
    prepare([], [])
    holder = OmegaConf.create({group: None})
    try:
        _set(holder, group, values, group)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error
    return checked(holder[group])


def _set(cfg: DictConfig, key: str, values: Any, group: str) -> None:
    """Sets a key to an option of a group, including options nested in it under names, as in a mixture."""
    cls = spec_class(group.rpartition(".")[2], values.get("kind") if isinstance(values, dict) else None)
    values = _renamed(cls, values, f"{group}.")
    cfg[key] = OmegaConf.structured(cls)
    for name in NESTED_OPTIONS.get(group, {}).keys() & values.keys():
        nested = values.pop(name)
        nested = {"kind": NESTED_OPTIONS[group][name], **nested} if isinstance(nested, dict) else nested
        _set(cfg[key], name, nested, f"{group}.{name}")
    held = {name for name, hint in typing.get_type_hints(cls).items() if _holds_options(hint)}
    for name in held & values.keys():
        if not isinstance(values[name], dict | None):
            raise ConfigError(f"{group}.{name} is {ascii(values[name])[:60]}, not a mapping of options: restore it")
        for child, option in (values[name] or {}).items():
            _set(cfg[key][name], child, option, _group_of(typing.get_type_hints(cls)[name]))
    cfg[key].merge_with({name: value for name, value in values.items() if name not in held})


def _renamed(cls: Any, values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Returns a spec's saved values under the current names of its fields, without removed ones.

    `prefix`: of its keys in the group.
    """
    types = typing.get_type_hints(cls)
    renamed = {}
    for old, value in values.items():
        if removed(f"{prefix}{old}", types):
            continue
        name = current_name(f"{prefix}{old}", types) or old
        items = typing.get_args(types.get(name))[:1] if isinstance(value, list) else ()
        # An option has a kind, whose class may have further keys: `_set` renames them.
        if isinstance(value, dict) and "kind" not in value and dataclasses.is_dataclass(types.get(name)):
            value = _renamed(types[name], value, f"{prefix}{name}.")
        elif items and dataclasses.is_dataclass(items[0]):
            value = [_renamed(items[0], v, f"{prefix}{name}.") if isinstance(v, dict) else v for v in value]
        renamed[name] = value
    return renamed


def _holds_options(hint: Any) -> bool:
    """Returns whether a field's type is a dictionary of specs with a `kind`."""
    (_, of) = typing.get_args(hint) if typing.get_origin(hint) is dict else (None, None)
    return dataclasses.is_dataclass(of) and any(f.name == "kind" for f in dataclasses.fields(of))


def _group_of(hint: Any) -> str:
    """Returns the group of the specs in a dictionary: the package `clipx.<group>` of their class."""
    (_, of) = typing.get_args(hint)
    return str(of.__module__).split(".")[1]
