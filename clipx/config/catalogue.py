"""The options of each group and the commands: the YAML files of the configuration, with the specs that they select."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from clipx.commands import implementation
from clipx.config.registry import (
    CONF_DIR,
    NESTED_OPTIONS,
    discover_installed,
    kinds,
    load_folder,
    load_options,
    option_files,
)

_SCHEMA = re.compile(r"/schema/\w+/([\w.-]+)@_here_")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a group."""

    kind: str
    """Name of the schema that it has."""

    files: tuple[Path, ...]
    """Its YAML file, and those of the options that it extends."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that composes a configuration."""

    config: str
    """Name of its YAML file."""

    file: Path

    module: str
    """Module that `python -m` runs."""

    @property
    def spec(self) -> type:
        """Class of its configuration."""
        return kinds("")[{"train": "run"}.get(self.config, self.config)]


def load_all(folders: Sequence[Path] = ()) -> None:
    """Registers the options of all groups and commands, and those in `folders`, as of --config-dir."""
    load_groups()
    for folder in folders:
        load_folder(folder)
    for command in commands():
        module = importlib.import_module(implementation(command.module))
        if hasattr(module, "__path__") and importlib.util.find_spec(f"{command.module}.spec"):
            importlib.import_module(f"{command.module}.spec")


def load_groups() -> None:
    """Registers the options of all groups."""
    for root in (CONF_DIR, *discover_installed()):
        for folder in (*root.glob("*/"), *root.glob("*/*/")):
            load_options(folder.name)


@functools.cache
def commands() -> tuple[Command, ...]:
    """Returns the commands, in the order of their modules."""
    files = [path for folder in (CONF_DIR, *discover_installed()) for path in folder.glob("*.yaml")]
    found = [Command(path.stem, path, read_yaml(path)["hydra"]["help"]["app_name"]) for path in files]
    return tuple(sorted(found, key=lambda command: command.module))


def groups() -> list[str]:
    """Returns the groups of which options are registered. Call `load_all` before."""
    schema = ConfigStore.instance().repo["schema"]
    return sorted(name for name, stored in schema.items() if isinstance(stored, dict))


def folder_of(group: str) -> str:
    """Returns the folder of a group below conf/, which is its name on the command line: `hydra/launcher`, `model/text`,
    `data`."""
    parent = next((parent for parent in ("hydra", *NESTED_OPTIONS) if (CONF_DIR / parent / group).is_dir()), None)
    return f"{parent}/{group}" if parent else group


def options(group: str, folders: Sequence[Path] = ()) -> dict[str, Option]:
    """Returns the options of a group by name: those of clipx and of installed packages, and those in `folders`."""
    files = option_files(folder_of(group), folders)
    return {name: _option(name, folder_of(group), files) for name in files}


def _option(name: str, group: str, files: dict[str, Path]) -> Option:
    """Returns an option. Its defaults list selects the schema, or the option of the same group that has it."""
    kind, of = "", [files[name]]
    for item in read_yaml(files[name]).get("defaults", []):
        if found := _SCHEMA.fullmatch(str(item)):
            kind = found[1]
        elif (base := str(item).removeprefix(f"/{group}/").removesuffix("@_here_")) in files:
            extended = _option(base, group, files)
            kind, of = extended.kind, [*of, *extended.files]
    return Option(kind, tuple(of))


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the values of a YAML file of the configuration, with interpolations as text."""
    return typing.cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(path)))
