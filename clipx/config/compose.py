"""Composes a configuration with Hydra and checks it before it becomes a spec."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep
from hydra.version import VersionBase
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import clipx.config.base  # noqa: F401  # registers what conf/model/weights.yaml composes without weights
from clipx.config import plugins, source
from clipx.config.grammar import unreadable
from clipx.config.messages import (
    MISPLACED_ERRORS,
    misplaced_key,
    missing_value,
    one_line,
    option_key,
    unknown_key,
    unknown_option,
)
from clipx.config.registry import (
    CONF_DIR,
    LIST_GROUPS,
    MISSING,
    check_new_names,
    discover_installed,
    load_folder,
    option_files,
)
from clipx.errors import ClipxError, ConfigError, require, with_location
from clipx.escape import escaped, is_text
from clipx.storage.url import check_environment, check_secrets, from_home


@contextlib.contextmanager
def isolated_hydra() -> Iterator[None]:
    """Initializes Hydra with clipx's configuration. Restores the state of an outer Hydra application on exit."""
    base, outer = VersionBase.instance().getbase(), GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            yield
    finally:
        VersionBase.instance().version_base = base
        GlobalHydra.instance().hydra = outer


def compose_config(
    config_name: str, overrides: Sequence[str], folders: Sequence[Path], with_hydra: bool = False
) -> DictConfig:
    """Returns the composed configuration, unchecked; `with_hydra` with Hydra's part of it. Raises ConfigError."""
    prepare(overrides, folders)
    searchpath = f"hydra.searchpath={[str(folder.absolute()) for folder in folders]}"
    with isolated_hydra(), misplaced_keys_as_errors(overrides):
        return hydra_compose(config_name, [*overrides, searchpath], return_hydra_config=with_hydra)


@contextlib.contextmanager
def misplaced_keys_as_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Converts what OmegaConf raises for an override of a key of a list or of null to a ConfigError."""
    try:
        yield
    except MISPLACED_ERRORS as error:
        if message := misplaced_key(error, overrides):
            raise ConfigError(message) from error
        raise


def prepare(overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """Registers the options of installed packages and of `folders`.

    Raises ConfigError for overrides that Hydra rejects without a reason or misreads.
    """
    for typed in overrides:  # before Hydra writes the overrides to a file, as in a sweep
        check_secrets(typed.partition("=")[0], typed.partition("=")[2].strip("'\""))
    with plugins.calls():
        source.register()
    installed = discover_installed()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir={folder} is not a folder: give a folder that contains config groups")
        check_new_names(folder, installed)
        load_folder(folder)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        group, value = override.key_or_group, override.value()
        known = list(option_files(group, folders))
        if not group:
            raise ConfigError(unreadable(str(override.input_line)))
        if override.is_delete() and group in LIST_GROUPS and value is None:
            raise ConfigError(f"~{group} cannot delete a list of options: write {group}=[] for none")
        _check_sweep(override, known)
        if override.is_delete() or not known:
            continue
        if override.is_add() and override.package is None and group not in LIST_GROUPS and (CONF_DIR / group).is_dir():
            typed = str(override.input_line)
            raise ConfigError(f"{typed} adds a second {group}, and a run has one: write {typed[1:]}")
        for choice in value.list if isinstance(value, ChoiceSweep) else [value]:
            names = choice if isinstance(choice, list) and group in LIST_GROUPS else [choice]
            if any(isinstance(name, (NoneType, int, float, list, dict)) for name in names):
                raise ConfigError(unknown_option(group, str(override.input_line).partition("=")[2], known))


def _check_sweep(override: Override, known: Sequence[str]) -> None:
    """Raises ConfigError for a range or a pattern without a value, with which a sweep has no point, or no folder."""
    value, typed = override.value(), override.input_line
    is_folder = override.key_or_group in ("hydra.sweep.dir", "hydra.run.dir")
    require(not is_folder or value not in ("", None), f"{typed} is empty: give a folder, or remove it")
    empty = isinstance(value, RangeSweep) and not any(True for _ in value.range())
    require(not empty, f"{typed} is an empty range, so nothing would run: give start and stop, as range(0,3)")
    matches = not isinstance(value, Glob) or value.filter(list(known))
    require(bool(matches), f"{typed} matches no option of a group, so nothing would run: correct the pattern")


def config_folders(hydra: Any = None) -> list[Path]:
    """Returns the folder of --config-dir, if it was given. `hydra`: node `hydra` of a configuration, by default of that
    of the command that runs now."""
    if hydra is None and HydraConfig.initialized():
        hydra = HydraConfig.get()
    sources = [] if hydra is None else hydra.runtime.config_sources
    return [Path(one.path) for one in sources if one.schema == "file" and one.provider == "command-line"]


def task_overrides(hydra: Any) -> list[str]:
    """Returns the overrides of a run or a sweep point, ${} unresolved. `hydra`: node `hydra` of its configuration."""
    return typing.cast("list[str]", OmegaConf.to_container(hydra.overrides.task))


def command_line(hydra: Any) -> str:
    """Returns the overrides of a run or a sweep point as one line."""
    return " ".join(task_overrides(hydra))


def checked(cfg: DictConfig, prefix: str = "") -> Any:
    """Returns the checked spec of a composed configuration. `prefix`: of its keys in errors. Raises ConfigError."""
    try:
        if missing := OmegaConf.missing_keys(cfg):
            raise ConfigError(missing_value(prefix + min(missing, key=lambda key: (not key.endswith(".kind"), key))))
        _check_nodes(cfg, prefix)
        with plugins.calls():
            return OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error


def _check_nodes(cfg: DictConfig, prefix: str = "") -> None:
    """Rejects what OmegaConf accepts in a typed node: keys added with `+`, a changed `kind`, non-finite numbers.

    Also rejects values that must not be saved (secrets) and values that would change when the saved configuration is
    read (interpolations). Raises ConfigError.
    """
    cls = OmegaConf.get_type(cfg)
    defaults = {f.name: f.default for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else None
    for key in (defaults or {}).keys() - set(map(str, cfg)):  # deleted by ~KEY
        require((defaults or {})[key] != MISSING, missing_value(f"{prefix}{key}"))
    for key in map(str, cfg):
        full, value = f"{prefix}{key}", cfg[key]
        if defaults is not None and key not in defaults:
            raise ConfigError(unknown_key(full, list(defaults), cfg))
        if isinstance(value, DictConfig):
            _check_nodes(value, f"{full}.")
            if defaults is None and "." in prefix[:-1]:
                _check_nested_option(value, full)
        elif defaults is not None and key == "kind" and value != defaults[key]:
            fix = f"choose an option of the group, {option_key(prefix[:-1])}=…" if prefix else "remove it"
            raise ConfigError(f"{full}={value} cannot be set: {fix}")
        for item in value if isinstance(value, ListConfig) else [value]:
            if isinstance(item, float) and not math.isfinite(item):
                raise ConfigError(f"{full}={item} is not a finite number: give one")
        for text in _texts(value):
            require(is_text(text), f"{full}={escaped(text)} contains an unprintable character: remove it")
            check_secrets(full, text)
            check_environment(full, text)
            require("${" not in text, f"{full}={text} contains ${{, which cannot be saved: remove it")
        if isinstance(value, str) and value.startswith("~"):
            cfg[key] = from_home(full, value)


def _texts(value: Any) -> Iterator[str]:
    """Yields the strings of a leaf: the leaf itself, or the items of a list."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, ListConfig):
        for item in value:
            yield from _texts(item)


def _check_nested_option(option: DictConfig, location: str) -> None:
    """Checks an option nested in another one under a name, as in a mixture. Errors name the full keys."""
    try:
        OmegaConf.to_object(option)
    except ClipxError as error:
        raise with_location(error, location, map(str, option)) from error


def with_run_dir(cfg: DictConfig, hydra: Any) -> DictConfig:
    """Sets the run directory of a sweep point to the point's output directory, unless an override sets it."""
    if "run_dir" in cfg and not any(str(text).startswith("run_dir=") for text in hydra.overrides.task):
        cfg.run_dir = hydra.runtime.output_dir
    return cfg
