"""The options of each group and the commands: the YAML files of the configuration, with what they select and set."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from clipx.config.registry import CONF_DIR, NESTED_OPTIONS, discover, discover_installed

_SCHEMA = re.compile(r"/schema/(?P<group>\w+)/(?P<kind>[\w.-]+)@_here_")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a group: one YAML file."""

    name: str
    about: str
    """Comment at the start of the file."""

    kind: str
    """Name of the schema that it has."""

    values: dict[str, Any]
    """Values that it sets, by key relative to the group, `image.size`; those of the option that it extends included."""

    selects: dict[str, Any]
    """Options of other groups that it selects instead of the defaults, by group."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that composes a configuration."""

    config: str
    """Name of its YAML file."""

    module: str
    template: str
    """Text of `--help`, with $-placeholders."""

    values: dict[str, Any]
    """Values that the file sets, by key."""

    @property
    def spec(self) -> type:
        """Class of its configuration."""
        return kinds("")[{"train": "run"}.get(self.config, self.config)]


def load_all(folders: Sequence[Path] = ()) -> None:
    """Registers the options of all groups and commands, and those in `folders`, as of --config-dir."""
    discover_installed()
    discover(CONF_DIR)
    for folder in folders:
        discover(folder, plugin=True)
    for command in commands():
        module = importlib.import_module(command.module)
        if hasattr(module, "__path__") and importlib.util.find_spec(f"{command.module}.spec"):
            importlib.import_module(f"{command.module}.spec")


@functools.cache
def commands() -> tuple[Command, ...]:
    """Returns the commands, in the order of their modules."""
    found = []
    for path in CONF_DIR.glob("*.yaml"):
        cfg = OmegaConf.load(path)
        assert isinstance(cfg, DictConfig)
        about = cfg.pop("hydra").help
        del cfg["defaults"]
        found.append(Command(path.stem, about.app_name, about.template, dict(_leaves(cfg))))
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


def kinds(group: str) -> dict[str, type]:
    """Returns the spec class of each registered kind of a group. `group` "": of commands."""
    stored = ConfigStore.instance().repo["schema"]
    nodes = stored[group] if group else {name: node for name, node in stored.items() if not isinstance(node, dict)}
    return {
        name.removesuffix(".yaml"): typing.cast("type", OmegaConf.get_type(node.node))
        for name, node in sorted(nodes.items())
    }


def options(group: str, folders: Sequence[Path] = ()) -> dict[str, Option]:
    """Returns the options of a group by name: those of clipx, and those in `folders`."""
    found: dict[str, Option] = {}
    group = folder_of(group)
    for folder in (CONF_DIR, *folders):
        for path in (folder / group).glob("*.yaml"):
            found[path.stem] = _option(path, group, (CONF_DIR, *folders))
    return dict(sorted(found.items()))


def _option(path: Path, group: str, folders: Sequence[Path]) -> Option:
    kind, values, selects = "", dict[str, Any](), dict[str, Any]()
    cfg = OmegaConf.load(path)
    assert isinstance(cfg, DictConfig)
    for item in typing.cast("list[Any]", OmegaConf.to_container(cfg.pop("defaults", OmegaConf.create([])))):
        if isinstance(item, dict):
            selects |= {_group_of_default(str(key), group): value for key, value in item.items()}
        elif found := _SCHEMA.fullmatch(item):
            kind = found["kind"]
        elif extended := _file(item, group, folders):
            base = _option(extended, group, folders)
            kind, values, selects = base.kind, base.values | values, base.selects | selects
    values |= dict(_leaves(cfg))
    return Option(path.stem, _comment(path), kind, values, selects)


def _group_of_default(key: str, group: str) -> str:
    """Returns the group of an entry of a defaults list: `override /data`, or `text` of the group `model`."""
    name = re.sub(r"^override |@.*$", "", key)
    return name.removeprefix("/") if name.startswith("/") else f"{group}/{name}"


def _file(item: str, group: str, folders: Sequence[Path]) -> Path | None:
    """Returns the file of an option of the same group that a defaults list names. None: it names no such option."""
    name = item.removeprefix(f"/{group}/").removesuffix("@_here_")
    return next((path for folder in folders if (path := folder / group / f"{name}.yaml").is_file()), None)


def _leaves(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key in map(str, cfg):
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and len(node):
            yield from _leaves(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", OmegaConf.to_container(cfg, resolve=False)[key]  # type: ignore[call-overload,index]


def _comment(path: Path) -> str:
    """Returns the comment at the start of a YAML file, as one line."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not re.match(r"#\s*(@package|yaml-language-server:)", line):
            lines.append(line.removeprefix("#").strip())
    return " ".join(lines)
