"""Typed specs <-> Hydra: the registry, composition, saved configurations and one-line errors. cli.py has the commands.

The only module that imports omegaconf. Nothing here imports torch, so `--help`, `--cfg job`, tab completion and
a mistyped key answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import HydraContext
from hydra.version import VersionBase
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from clipx import plugins
from clipx.errors import (
    LISTS,
    ClipxError,
    ConfigError,
    chosen,
    no_such_key,
    no_such_option,
    no_value,
    placed,
    require,
    reworded,
)
from clipx.resume import Resume
from clipx.storage.url import check_environment, check_secrets

if TYPE_CHECKING:
    from clipx.spec import RunSpec

__all__ = [
    "CONF_DIR",
    "LAUNCH",
    "MISSING",
    "NOT_COMPOSED",
    "PACKAGE",
    "as_typed",
    "checked",
    "compose",
    "compose_point",
    "discover",
    "from_dict",
    "in_its_folder",
    "launchers",
    "one_line",
    "option",
    "prepare",
    "quoted",
    "save",
    "to_dict",
]

PACKAGE = Path(__file__).parent
# A wheel carries the configuration and the launchers inside the package; in a checkout they are at the top level.
CONF_DIR = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
LAUNCH = "clipx.launch" if (PACKAGE / "launch").is_dir() else "launch"
# Files that say nothing to a user.
_COMMANDS = (
    *("train", "evaluate", "caption", "wise_ft", "embed"),
    *("export", "plan", "bench", "index", "prepare", "hydra/config"),
)
NOT_COMPOSED = (HydraException, OmegaConfBaseException, yaml.YAMLError)

Spec = TypeVar("Spec")


# ------------------------------------------------------------------------------------------------ registry


def option(group: str) -> Callable[[type[Spec]], type[Spec]]:
    """Class decorator: registers a spec under `/schema/<group>/<kind>`, `kind` being the default of its `kind` field.

    The ConfigStore is the only registry: YAML refers to the schema, a saved configuration to the kind.
    """

    def register(cls: type[Spec]) -> type[Spec]:
        kind = next(f.default for f in dataclasses.fields(cls) if f.name == "kind")  # type: ignore[arg-type]
        ConfigStore.instance().store(group=f"schema/{group}" if group else "schema", name=str(kind), node=cls)
        return cls

    return register


def discover(conf_dir: Path, own: bool = True) -> None:
    """Imports the module of each option under `conf_dir`, so that it registers its schema.

    An option and the module that reads it share a name: `conf/objective/infonce.yaml` and
    `clipx/objective/infonce.py`. In a user's own `--config-dir` the module lies beside the YAML file.
    """
    for path in sorted(conf_dir.glob("*/*.yaml")):
        group, name = path.parent.name, path.stem
        if own and (PACKAGE / group / f"{name}.py").is_file():
            importlib.import_module(f"clipx.{group}.{name}")
        elif not own and path.with_suffix(".py").is_file():
            plugins.load(conf_dir.absolute(), group, name)


def launchers() -> None:
    """Registers the launchers' options. `launch` is the checkout's, whatever else has its name."""
    if LAUNCH not in sys.modules and LAUNCH == "launch":
        place = PACKAGE.parent / LAUNCH
        spec = importlib.util.spec_from_file_location(LAUNCH, place / "__init__.py")
        assert spec is not None and spec.loader is not None
        sys.modules[LAUNCH] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[LAUNCH])
    importlib.import_module(f"{LAUNCH}.options")


def _schema(group: str, kind: Any) -> type[Any]:
    """The spec class registered for a kind of a group."""
    options = ConfigStore.instance().repo.get("schema", {}).get(group, {})
    if f"{kind}.yaml" not in options:
        known = ", ".join(sorted(name.removesuffix(".yaml") for name in options))
        raise ConfigError(
            f"{group}.kind={kind} is not known: known are {known}; a plug-in's folder is given with --config-dir"
        )
    node = options[f"{kind}.yaml"].node
    return typing.cast("type[Any]", OmegaConf.get_type(node))


# --------------------------------------------------------------------------------------------- composition


def compose(*overrides: str, config_name: str = "train", config_dir: str | Path | None = None) -> RunSpec:
    """Composes and checks a run from Python or a notebook.

    `overrides` are what one types on the command line (`"model=vit_b32"`, `"data.batch_size=512"`); `config_dir`
    is a folder with groups of one's own. Raises ConfigError, one line naming value, rule and fix.
    """
    overrides = tuple(map(quoted, overrides))
    folders = [Path(config_dir).absolute()] if config_dir else []
    searchpath = [f"hydra.searchpath={[str(folder) for folder in folders]}"]
    try:
        prepare(overrides, folders)
        with _own_hydra():
            return typing.cast("RunSpec", checked(hydra_compose(config_name, [*overrides, *searchpath])))
    except NOT_COMPOSED as error:
        raise ConfigError(one_line(error)) from error


def quoted(override: str) -> str:
    """Quotes a pattern of paths, `data.shards=/data/{0000..0123}.tar`: the shell has taken the quotes that were typed,
    and Hydra's grammar knows braces only as a dictionary."""
    key, equals, value = override.partition("=")
    pattern = re.sub(r"\$\{[^}]*\}?", "", value)  # without interpolations
    several = "," in re.sub(r"\{[^}]*\}", "", pattern)
    if override.startswith("-") or "{" not in pattern or value[0] in "'\"[{" or several:
        return override
    return f"{key}{equals}'{value}'"


@contextlib.contextmanager
def _own_hydra() -> Iterator[None]:
    """Hydra on our configuration, whether or not another one is running: it is left as it was."""
    base, outer = VersionBase.instance().getbase(), GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            yield
    finally:
        VersionBase.instance().version_base = base
        GlobalHydra.instance().hydra = outer


def prepare(overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """Registers every option, and refuses overrides that Hydra has no words for, or takes for something else."""
    for typed in overrides:  # before Hydra writes them to a file, as it does in a sweep
        check_secrets(typed.partition("=")[0], typed.partition("=")[2])
    importlib.import_module("clipx.spec")
    launchers()
    discover(CONF_DIR)
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir={folder} is not a folder: give the folder that holds your groups")
        discover(folder, own=False)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        group, value = override.key_or_group, override.value()
        known = [path.stem for folder in (CONF_DIR, *folders) for path in (folder / group).glob("*.yaml")]
        if not group:
            raise ConfigError(_unreadable(str(override.input_line)))
        if override.is_delete() and group in LISTS and value is None:
            raise ConfigError(f"~{group} is not possible: for none write {group}=[]")
        if override.is_delete() or not known:
            continue
        for choice in value.list if isinstance(value, ChoiceSweep) else [value]:
            names = choice if isinstance(choice, list) and group in LISTS else [choice]
            if any(isinstance(name, (NoneType, int, float, list, dict)) for name in names):
                raise ConfigError(no_such_option(group, str(override.input_line).partition("=")[2], known))


def overrides_of(hydra: Any) -> list[str]:
    """The overrides of a run or a point, `hydra` being Hydra's part of its configuration; ${} in them stays."""
    return typing.cast("list[str]", OmegaConf.to_container(hydra.overrides.task))


def as_typed(hydra: Any) -> str:
    return " ".join(overrides_of(hydra))


def checked(cfg: DictConfig, prefix: str = "") -> Any:
    """The checked spec of a composed configuration, whose keys have `prefix` before them. Raises ConfigError."""
    try:
        if missing := OmegaConf.missing_keys(cfg):
            raise ConfigError(no_value(prefix + min(missing, key=lambda key: (not key.endswith(".kind"), key))))
        _check_nodes(cfg, prefix)
        if "resume" in cfg and "run_dir" in cfg and (own := Resume.parse(str(cfg.resume)).run_dir):
            cfg.run_dir = own  # to resume a run directory is to work in it
        return OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error


def _check_nodes(cfg: DictConfig, prefix: str = "") -> None:
    """Refuses what OmegaConf accepts in a typed node: a key added with `+`, another `kind`, numbers without end.

    Also values that may not be saved, or would be another when the saved configuration is read.
    """
    cls = OmegaConf.get_type(cfg)
    defaults = {f.name: f.default for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else None
    for key in map(str, cfg):
        full, child = f"{prefix}{key}", cfg._get_node(key)
        if defaults is not None and key not in defaults:
            raise ConfigError(no_such_key(full, list(defaults)))
        if isinstance(child, DictConfig) and not child._is_none():
            _check_nodes(child, f"{full}.")
            if defaults is None and "." in prefix[:-1]:
                _check_held(child, full)
        elif defaults is not None and key == "kind" and cfg[key] != defaults[key]:
            fix = f"choose an option of the group, {chosen(prefix[:-1])}=…" if prefix else "leave it out"
            raise ConfigError(f"{full}={cfg[key]} cannot be set: {fix}")
        elif isinstance(cfg[key], float) and not math.isfinite(cfg[key]):
            raise ConfigError(f"{full}={cfg[key]} is not a finite number: give one")
        for text in _texts(cfg[key]):
            check_secrets(full, text)
            check_environment(full, text)
            require("${" not in text, f"{full}={text} holds ${{, which no saved configuration may: leave it out")


def _texts(value: Any) -> Iterator[str]:
    """The texts in a leaf: itself, or those in a list."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, ListConfig):
        for item in value:
            yield from _texts(item)


def _check_held(held: DictConfig, place: str) -> None:
    """An option that another one holds under a name, as a mixture does: its errors name the keys where they are."""
    try:
        OmegaConf.to_object(held)
    except ClipxError as error:
        raise placed(error, place, map(str, held)) from error


def compose_point(context: HydraContext, config: DictConfig, overrides: Sequence[str], index: int) -> Any:
    """The checked spec of point `index` of the sweep that `config` is. For launchers; Hydra's state is left as it was.

    Raises ConfigError.
    """
    outer = HydraConfig.instance().cfg
    try:
        cfg = context.config_loader.load_sweep_config(config, list(overrides))
        with read_write(cfg.hydra.runtime), open_dict(cfg.hydra):
            cfg.hydra.job.id, cfg.hydra.job.num = str(index), index
            HydraConfig.instance().set_config(cfg)  # for values that refer to it
            cfg.hydra.runtime.output_dir = str(Path(cfg.hydra.sweep.dir, cfg.hydra.sweep.subdir).absolute())
        HydraConfig.instance().set_config(cfg)
        hydra = HydraConfig.get()
        with open_dict(cfg):
            del cfg["hydra"]
        return checked(in_its_folder(cfg, hydra))
    except NOT_COMPOSED as error:
        raise ConfigError(one_line(error)) from error
    finally:
        HydraConfig.instance().cfg = outer


def in_its_folder(cfg: DictConfig, hydra: Any) -> DictConfig:
    """A point of a sweep, `hydra` being Hydra's part of it: it has a run directory of its own, unless one was typed."""
    if "run_dir" in cfg and not any(str(text).startswith("run_dir=") for text in hydra.overrides.task):
        cfg.run_dir = hydra.runtime.output_dir
    return cfg


# -------------------------------------------------------------------------------------------------- saving


def to_dict(spec: Any) -> dict[str, Any]:
    """Plain values of a spec, for YAML, JSON and loggers."""
    return typing.cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.structured(spec), enum_to_str=True))


def save(spec: Any, path: Path) -> None:
    """Writes a spec as YAML that `from_dict` reads back."""
    path.write_text(yaml.safe_dump(to_dict(spec), sort_keys=False), encoding="utf-8")


def from_dict(cls: type[Spec], values: dict[str, Any]) -> Spec:
    """The inverse of `to_dict`: each group's class is found by its `kind`. Raises ConfigError."""
    prepare([], [])
    cfg = OmegaConf.structured(cls)
    types = typing.get_type_hints(cls)
    try:
        for key, value in values.items():
            if isinstance(value, dict) and "kind" in value:
                _set(cfg, key, value, key)
            elif isinstance(value, dict) and _holds_options(types.get(key)):
                for name, child in value.items():
                    _set(cfg[key], name, child, key)
            elif isinstance(value, dict) and dataclasses.is_dataclass(types.get(key)):
                cfg[key].merge_with(value)
            elif isinstance(value, list):  # its items may be specs
                cfg.merge_with({key: value})
            else:
                cfg[key] = value
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error
    return typing.cast(Spec, checked(cfg))


def option_from_dict(group: str, values: dict[str, Any]) -> Any:
    """One option of a group from its part of a saved configuration. Raises ConfigError."""
    prepare([], [])
    holder = OmegaConf.create({group: None})
    try:
        _set(holder, group, values, group)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error
    return checked(holder[group])


def _set(cfg: DictConfig, key: str, values: Any, group: str) -> None:
    """One option of a group, and the options that it may hold under names, as a mixture does."""
    cls = _schema(group, values.get("kind") if isinstance(values, dict) else None)
    cfg[key] = OmegaConf.structured(cls)
    held = {name for name, hint in typing.get_type_hints(cls).items() if _holds_options(hint)}
    for name in held & values.keys():
        for child, own in (values[name] or {}).items():
            _set(cfg[key][name], child, own, _group_of(typing.get_type_hints(cls)[name]))
    cfg[key].merge_with({name: value for name, value in values.items() if name not in held})


def _holds_options(hint: Any) -> bool:
    """Whether a field's type is a dictionary of specs with a kind."""
    (_, of) = typing.get_args(hint) if typing.get_origin(hint) is dict else (None, None)
    return dataclasses.is_dataclass(of) and any(f.name == "kind" for f in dataclasses.fields(of))


def _group_of(hint: Any) -> str:
    """The group of the specs in a dictionary: it shares its name with the module that their class is in."""
    (_, of) = typing.get_args(hint)
    return str(of.__module__).rpartition(".")[2]


# -------------------------------------------------------------------------------------------------- errors


def one_line(error: BaseException) -> str:
    """Hydra's, OmegaConf's and YAML's errors as one line with value, rule and fix."""
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if isinstance(error, yaml.YAMLError):
        return f"YAML cannot be read: {text}: correct the file"
    found = re.match(r"In '([^']+)'", text)
    inner = not found or found[1] in _COMMANDS or found[1].startswith("schema/")
    place = "" if found is None or inner else f" (in {found[1]}.yaml)"
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if group:
            return no_such_option(group, name, error.options or _options(group)) + place
    cause = _root(error)
    key = str(getattr(cause, "full_key", "") or "")
    if cause is not None and re.match(r"Key '[^']*' (is )?not in ", str(cause)):
        parent = cause.parent_node
        siblings = [str(name) for name in parent if name != "hydra"] if isinstance(parent, DictConfig) else []
        return no_such_key(key, siblings, free=OmegaConf.get_type(parent) is dict) + place
    return reworded(text if cause is None else str(cause).splitlines()[0], key, text) + place


def _unreadable(override: str) -> str:
    return f"{override} cannot be read: write key=value, a list as key=[a,b], and other signs as key='…'"


def _root(error: BaseException) -> OmegaConfBaseException | None:
    """OmegaConf's own error, which knows the key, under Hydra's."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OmegaConfBaseException):
        found = found.__cause__ or found.__context__
    return found


def _options(group: str) -> list[str]:
    """The options of a group that is named in a YAML file."""
    stored: Any = ConfigStore.instance().repo
    for part in group.split("/"):
        stored = stored.get(part, {})
    return [name.removesuffix(".yaml") for name in stored] or [p.stem for p in CONF_DIR.glob(f"{group}/*.yaml")]
