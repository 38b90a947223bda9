"""Output of `--help` and `--help KEY`: the keys of a command, or of a group, with their attribute docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from string import Template
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from clipx.config.entries import Entry, entries, unselected_entries
from clipx.config.meant import meant, meant_keys
from clipx.config.registry import CONF_DIR, kinds, option_files
from clipx.errors import ConfigError

_FLAGS = """\
--help KEY prints what a key means, --help GROUP all keys of a group. --cfg job prints all keys and values.
-m sweeps over comma-separated values; --config-dir adds a folder with groups of your own."""


def is_group(cfg: DictConfig, key: str) -> bool:
    """Returns whether a key is a group of which a composed configuration holds an option, such as `data`."""
    return key in cfg.hydra.runtime.choices and OmegaConf.select(cfg, key.replace("/", ".")) is not None


def overview(cfg: DictConfig, folders: Sequence[Path], unused: Sequence[str] = ()) -> str:
    """Returns the help of a command: its template, with the options of its groups, and its keys outside of them.

    Of `clipx.plan` the keys that a run does not have. `cfg` is the composed configuration with Hydra's part, which is
    removed. `unused`: groups that are left out.
    """
    named = {*cfg.hydra.runtime.choices, *map(str, cfg)} - {*unused}
    groups = [group for group in sorted(named) if group != "hydra" and option_files(group, folders)]
    template = Template(cfg.hydra.help.template)
    with open_dict(cfg):
        del cfg["hydra"]
    lines = [f"{group}: {', '.join(option_files(group, folders))}" for group in groups]
    flags = f"\n\n{_FLAGS}" if "$GROUPS" in template.template else ""
    elsewhere = {*groups, *unused, *(name for cls in kinds("").values() if _extends(cfg, cls) for name in _names(cls))}
    keys = [entry for entry in entries(cfg) if "." not in entry.key and entry.key not in elsewhere]
    texts = "\n\n".join(entry.text(_width()) for entry in keys)
    return template.safe_substitute(GROUPS="\n".join(lines), KEYS=texts) + flags


def _extends(cfg: DictConfig, cls: type) -> bool:
    own = OmegaConf.get_type(cfg)
    return own is not None and own is not cls and issubclass(own, cls)


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 120)


_PLUGINS = ("launcher", "sweeper")  # groups of Hydra for which clipx has options


def help_text(cfg: DictConfig, keys: Sequence[str], folders: Sequence[Path]) -> str:
    """Returns what `--help KEY…` prints: each key with type, value and doc, and the keys below it.

    `cfg` is the composed configuration with Hydra's part, which is removed. Raises ConfigError for an unknown key.
    """
    choices = OmegaConf.to_container(cfg.hydra.runtime.choices)
    assert isinstance(choices, dict)
    plugins = {f"hydra.{name}.": cfg.hydra[name] for name in _PLUGINS}
    with open_dict(cfg):
        del cfg["hydra"]
    known = list(entries(cfg))
    for prefix, node in plugins.items():
        known += entries(node, prefix) if dataclasses.is_dataclass(OmegaConf.get_type(node)) else []
    width = _width()
    parts: list[str] = []
    for key in (key.replace("/", ".") for key in keys):
        if (CONF_DIR / key).is_dir() and key in choices:
            parts.append(_group_header(cfg, key, choices[key], folders, width))
        found = [entry for entry in known if entry.is_under(key)] or _elsewhere(key) or meant_keys(key, cfg)
        if not found:
            near = get_close_matches(key, [entry.key for entry in known], n=3)
            fix = f"similar keys are {', '.join(near)}" if near else "--cfg job prints all keys"
            fix = f"it is {right}" if (right := meant(key, cfg)) else fix
            raise ConfigError(f"--help {key} names no key of this configuration: {fix}")
        parts += [entry.text(width) for entry in found if entry.key != key or entry.value != "{…}" or len(found) == 1]
    return "\n\n".join(parts)


def _group_header(cfg: DictConfig, group: str, choice: Any, folders: Sequence[Path], width: int) -> str:
    """Describes a group: its options, and the one that is selected."""
    names = ", ".join(option_files(group, folders))
    lines = [textwrap.fill(f"Options of {group}: {names}", width, subsequent_indent="    ")]
    node = OmegaConf.select(cfg, group)
    cls = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
    if dataclasses.is_dataclass(cls):
        about = textwrap.indent(inspect.cleandoc(cls.__doc__ or ""), "    ")
        lines.append(f"{group}={choice}\n{about}")
    return "\n\n".join(lines)


def _elsewhere(key: str) -> list[Entry]:
    """Returns a key's entries in the options of its group that the configuration does not select."""
    group = next((f"hydra.{name}" for name in _PLUGINS if key.startswith(f"hydra.{name}.")), key.partition(".")[0])
    found = [entry for entry in unselected_entries([group]) if entry.is_under(key)]
    return list({(entry.key, entry.option, entry.doc): entry for entry in found}.values())
