"""Typed specs <-> Hydra: the registry, composition, saved configurations and one-line errors.

The only module that imports omegaconf. Nothing here imports torch, so `--help`, `--cfg job`, tab completion and
a mistyped key answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra import main as hydra_main
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipx.errors import ClipxError, ConfigError

if TYPE_CHECKING:
    from clipx.spec import RunSpec

__all__ = ["CONF_DIR", "MISSING", "cli", "compose", "discover", "from_dict", "option", "save", "to_dict"]

_PACKAGE = Path(__file__).parent
# A wheel carries the configuration inside the package; in a checkout it is at the top level.
CONF_DIR = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"

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


def discover(conf_dir: Path, package: str | None = None) -> None:
    """Imports the module of each option under `conf_dir`, so that it registers its schema.

    An option and the module that reads it share a name: `conf/objective/infonce.yaml` and
    `clipx/objective/infonce.py`. In a user's own `--config-dir` the module lies beside the YAML file.
    """
    for path in sorted(conf_dir.glob("*/*.yaml")):
        group, name = path.parent.name, path.stem
        if package is not None:
            if (_PACKAGE / group / f"{name}.py").is_file():
                importlib.import_module(f"{package}.{group}.{name}")
        elif path.with_suffix(".py").is_file():
            _import_plugin(f"clipx_plugins.{group}.{name}", path.with_suffix(".py"))


def _import_plugin(module_name: str, path: Path) -> None:
    known = sys.modules.get(module_name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses look their module up while it is executed
    module_spec.loader.exec_module(module)


def _schema(group: str, kind: str) -> type[Any]:
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
    _register_all([Path(config_dir)] if config_dir else [])
    searchpath = [f"hydra.searchpath=[{Path(config_dir).absolute()}]"] if config_dir else []
    was_initialized = GlobalHydra.instance().is_initialized()
    try:
        if was_initialized:
            cfg = hydra_compose(config_name, [*overrides, *searchpath])
        else:
            with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
                cfg = hydra_compose(config_name, [*overrides, *searchpath])
        return typing.cast("RunSpec", _to_spec(cfg))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error


def _register_all(config_dirs: Sequence[Path]) -> None:
    importlib.import_module("clipx.spec")
    discover(CONF_DIR, package="clipx")
    for config_dir in config_dirs:
        if not config_dir.is_dir():
            raise ConfigError(f"--config-dir={config_dir} is not a folder: give the folder that holds your groups")
        discover(config_dir)


def _to_spec(cfg: DictConfig) -> Any:
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(f"{missing[0]} has no value: it is required; add {missing[0]}=…")
    _refuse_added_keys(cfg)
    if cfg.get("resume", "none") not in ("none", "auto") and "run_dir" in cfg:
        cfg.run_dir = cfg.resume  # to resume a run directory is to work in it
    return OmegaConf.to_object(cfg)


def _refuse_added_keys(cfg: DictConfig, prefix: str = "") -> None:
    """A key added with `+` to a typed node would have no effect."""
    node_type = OmegaConf.get_type(cfg)
    known = [f.name for f in dataclasses.fields(node_type)] if dataclasses.is_dataclass(node_type) else None
    for key in map(str, cfg):
        full = f"{prefix}{key}"
        if known is not None and key not in known:
            raise ConfigError(_no_such_key(full, known))
        child = cfg._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _refuse_added_keys(child, f"{full}.")


def cli(task: Callable[[Any], Any], config_name: str) -> Callable[[], None]:
    """The entry point of a command: compose, check, run; every user's error is one line and a non-zero exit code."""

    def job(cfg: DictConfig) -> Any:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            if "run_dir" in cfg:
                cfg.run_dir = HydraConfig.get().runtime.output_dir  # each point of a sweep has its own folder
            return task(_to_spec(cfg))
        try:
            return task(_to_spec(cfg))
        except ClipxError as error:  # past Hydra, which would print a line of its own
            failed.append(error)

    failed: list[ClipxError] = []

    def main() -> None:
        full_error = bool(os.environ.get("HYDRA_FULL_ERROR"))
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises; the words are chosen here
        code = 0
        try:
            _register_all(_config_dirs(sys.argv[1:]))
            hydra_main(config_path=str(CONF_DIR), config_name=config_name, version_base="1.3")(job)()
            if failed:
                raise failed[0]
        except ClipxError as error:
            code = error.exit_code
            _report_error(str(error), full_error)
        except (HydraException, OmegaConfBaseException) as error:
            code = ConfigError.exit_code
            _report_error(_one_line(error), full_error)
        except KeyboardInterrupt:
            code = 130
            print("interrupted", file=sys.stderr)
        if code:
            sys.exit(code)

    return main


def _config_dirs(argv: Sequence[str]) -> list[Path]:
    """The folders given by --config-dir: their plug-ins must be registered before Hydra composes."""
    found = []
    for i, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            found.append(Path(value if equals else argv[i + 1] if i + 1 < len(argv) else ""))
    return found


def _report_error(message: str, full: bool) -> None:
    if full:
        traceback.print_exc()
    rank = os.environ.get("RANK")
    print(f"error{f' (rank {rank})' if rank else ''}: {message}", file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------- saving


def to_dict(spec: Any) -> dict[str, Any]:
    """Plain values of a spec, for YAML, JSON and loggers."""
    return typing.cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.structured(spec), enum_to_str=True))


def save(spec: Any, path: Path) -> None:
    """Writes a spec as YAML that `from_dict` reads back."""
    path.write_text(yaml.safe_dump(to_dict(spec), sort_keys=False), encoding="utf-8")


def from_dict(cls: type[Spec], values: dict[str, Any]) -> Spec:
    """The inverse of `to_dict`: each group's class is found by its `kind`. Raises ConfigError."""
    _register_all([])
    cfg = OmegaConf.structured(cls)
    types = typing.get_type_hints(cls)
    try:
        for key, value in values.items():
            if isinstance(value, dict) and "kind" in value:
                cfg[key] = OmegaConf.merge(OmegaConf.structured(_schema(key, value["kind"])), value)
            elif isinstance(value, dict) and typing.get_origin(types.get(key)) is dict:
                cfg[key] = {
                    name: OmegaConf.merge(OmegaConf.structured(_schema(key, child["kind"])), child)
                    for name, child in value.items()
                }
            else:
                cfg[key] = value
        return typing.cast(Spec, OmegaConf.to_object(cfg))
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error


# -------------------------------------------------------------------------------------------------- errors

_RULES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


def _one_line(error: BaseException) -> str:
    """Hydra's and OmegaConf's errors as one line with value, rule and fix."""
    text = " ".join(str(error).split())
    cause = _root(error)
    if cause is None:
        return _unknown_option(text) or re.sub(r" Config search path:.*| See https?://.*", "", text)
    key = str(getattr(cause, "full_key", "") or "")
    why = str(cause).splitlines()[0]
    return _unknown_key(why, key, cause) or _wrong_value(why, key) or f"{key}: {why}"


def _root(error: BaseException) -> BaseException | None:
    """OmegaConf's own error, which knows the key, under Hydra's."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OmegaConfBaseException):
        found = found.__cause__
    return found


def _unknown_option(text: str) -> str | None:
    found = re.search(r"Could not (?:find|load) '([^']+)/([^'/]*)'", text)
    if found is None:
        return None
    options = sorted(
        {path.stem for folder in (CONF_DIR, *_config_dirs(sys.argv[1:])) for path in (folder / found[1]).glob("*.yaml")}
    )
    if not options:
        return f"{found[1]}={found[2]} is not an option: there is no group {found[1]}"
    return f"{found[1]}={found[2]} is not an option: choose from {', '.join(options)}{_near(found[2], options)}"


def _unknown_key(why: str, key: str, cause: BaseException) -> str | None:
    if not re.match(r"Key '[^']*' (is )?not in ", why):
        return None
    parent = getattr(cause, "parent_node", None)
    return _no_such_key(key, [str(k) for k in parent] if isinstance(parent, DictConfig) else [])


def _no_such_key(key: str, siblings: Sequence[str]) -> str:
    return f"{key} is not a key here: the keys are {', '.join(siblings)}{_near(key.rpartition('.')[2], siblings)}"


def _wrong_value(why: str, key: str) -> str | None:
    if found := re.match(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", why):
        return f"{key}={found[1]} has the wrong type: give {_RULES.get(found[2], f'a {found[2]}')}"
    if found := re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", why):
        return f"{key}={found[1]} is not a choice: choose from {found[2]}"
    if re.match(r"field '.*' is not Optional", why):
        return f"{key}=null is not allowed: give a value"
    return None


def _near(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
