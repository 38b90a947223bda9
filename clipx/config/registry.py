"""Registry of options: `@register(group)` on a spec stores its schema in Hydra's ConfigStore. Resolvers of conf.

Nothing in this package imports torch, so that `--help`, `--cfg job`, tab completion and configuration errors are
immediate.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING as MISSING
from omegaconf import Node, OmegaConf
from omegaconf.resolvers import oc

from clipx.compat import full_key_of
from clipx.config import plugins
from clipx.config.options import check_options, places
from clipx.config.options import option as option
from clipx.config.specs import complete as complete
from clipx.config.specs import frozen as frozen
from clipx.errors import ConfigError, require, require_effect
from clipx.storage.url import is_secret

PACKAGE = Path(__file__).parents[1]
# In a wheel the configuration is inside the package, in a checkout at the top level.
CONF_DIR = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"

LIST_GROUPS = ("evaluator", "logger")  # groups of which a run selects any number of options
NESTED_OPTIONS = {"model": {"text": "clip"}}
"""Options that an option of a group contains, with the kind that runs had before there was a choice."""

SAVED = "saved"
"""Option of each group, and group of all other keys, that `base.based_on` makes of a saved configuration."""

DESCRIBED = "described"
"""Text tower, and group of all other keys, that `base.describe_model` makes of the configuration of weights."""

Spec = TypeVar("Spec")

# A recipe sets values (conf/recipe), but cannot choose an option: Hydra refuses `override` in a group that is chosen by
# an interpolation, as `recipe: ${data}` is. conf/train.yaml chooses the precision by the resolver `recipe_precision`.
_DEFAULT = "auto"
_REAL_IMAGES = ("cc3m", "cc12m", "laion400m", "laion2b", "datacomp_small", "datacomp_medium", "datacomp1b")
_PRECISIONS = dict.fromkeys(_REAL_IMAGES, "amp_bf16")


def recipe_precision(data: str) -> str:
    """Returns the option of the group `precision` for the option `data`."""
    return _PRECISIONS.get(data, _DEFAULT)


def choose(value: Any, table: Mapping[Any, Any]) -> Any:
    """Returns the entry of a table, for a value that depends on another key:
    `lr: ${choose:${data.batch_size},{16:1e-3,64:2e-3}}`.

    Raises ConfigError for a value that the table does not have.
    """
    require(
        value in table, f"{value} is not one of {', '.join(map(str, table))}, for which this configuration is tuned"
    )
    return table[value]


_PLACES = re.compile(r"USER|LOGNAME|HOSTNAME|(?:SLURM|PBS|LSB)_\w+")  # environment variables of a user, host or job


def env(variable: str, *default: Any, _node_: Node) -> Any:
    """OmegaConf's resolver `oc.env`, for variables whose values may be saved with a run.

    Raises ConfigError for secrets, and in `name`, a part of folders and of names of other services, for all but the
    variables of a user, host or job.
    """
    key = full_key_of(_node_)(None)
    shown = f"{key} reads the environment variable {variable}"
    require(not is_secret(variable), f"{shown}, a secret, which the run would save: remove it")
    require(
        key != "name" or _PLACES.fullmatch(variable) is not None,
        f"{shown}, and names become folders and are shown by other services: write the name, or read one of USER, "
        "LOGNAME, HOSTNAME, SLURM_…, PBS_…, LSB_…",
    )
    return oc.env(variable, *default)


def no_sizes() -> None:
    """Raises the error of model=weights without weights, which replace the value of model.name that calls this."""
    raise ConfigError(
        "model=weights takes the sizes of a new run from the configuration that comes with model.weights=…, which the "
        "command line of clipx.train or clipx.plan must give: add it, or choose another model"
    )


OmegaConf.register_new_resolver("no_sizes", no_sizes, replace=True)  # in conf/model/weights.yaml
OmegaConf.register_new_resolver("oc.env", env, replace=True)
OmegaConf.register_new_resolver("recipe_precision", recipe_precision, replace=True)  # in conf/train.yaml
OmegaConf.register_new_resolver("choose", choose, replace=True)  # in conf/experiment


def register(group: str) -> Callable[[type[Spec]], type[Spec]]:
    """Class decorator: registers a spec under `/schema/GROUP/KIND`. KIND is the default of its `kind` field.

    The ConfigStore is the only registry: YAML files refer to the schema, a saved configuration to the kind. When a spec
    is made, the rules of its fields are checked before its `__post_init__`.
    """

    def decorate(cls: type[Spec]) -> type[Spec]:
        named = f"{cls.__module__}.{cls.__qualname__}, which @register({group!r}) registers,"
        require(dataclasses.is_dataclass(cls), f"{named} is not a dataclass: write @frozen below @register")
        kind = next((f.default for f in dataclasses.fields(cls) if f.name == "kind"), dataclasses.MISSING)  # type: ignore[arg-type]
        require(isinstance(kind, str) and kind != MISSING, f"{named} has no kind: give it a field, kind: str = NAME")
        ConfigStore.instance().store(group=f"schema/{group}" if group else "schema", name=str(kind), node=cls)
        _check_when_made(cls, group, str(kind))
        return cls

    return decorate


def _check_when_made(cls: type[Any], group: str, kind: str) -> None:
    """Makes the `__post_init__` of a registered class check the rules of its fields first."""
    parent = next((parent for parent, parts in NESTED_OPTIONS.items() if group in parts), None)
    place = f"{parent}.{group}" if parent else f"{group}.{kind}" if group in LIST_GROUPS else group
    place = {"launcher": "hydra.launcher", "sweeper": "hydra.sweeper", "bench": ""}.get(group, place)
    places[cls] = prefix = f"{place}." if place else ""
    own = cls.__post_init__

    def __post_init__(self: Any) -> None:
        if type(self) is cls or type(self) not in places:  # once, where a registered class derives from another
            check_options(self, prefix, None if prefix else self)
        own(self)

    cls.__post_init__ = __post_init__


_discovering: list[str] = []  # module that `discover_installed` imports
missing_parts: set[str] = set()
"""Packages of clipx that its entry points name and that are not there, such as `clipx.extra`."""


file_specs: dict[str, type[Any]] = {}
"""Classes of the files of a folder of the configuration that is no group, such as expectation/, by the folder."""


def file_spec(folder: str) -> Callable[[type[Spec]], type[Spec]]:
    """Class decorator: registers the class of the files of a folder that is no group, for the JSON schema."""

    def register(cls: type[Spec]) -> type[Spec]:
        file_specs[folder] = cls
        return cls

    return register


@functools.cache
def discover_installed() -> tuple[Path, ...]:
    """Imports the modules that installed packages name under the entry point `clipx.options`, as clipx_launch does.

    The modules register their options, so a package extends clipx without being named in it. Returns the folders `conf`
    next to these modules, whose YAML files Hydra then finds. Cached per process: finding entry points reads the
    metadata of every installed package. Raises ConfigError for a module that cannot be imported.
    """
    folders = list[Path]()
    # What is found first is listed first: clipx's own, and no order of folders, which differs between machines.
    found = importlib.metadata.entry_points(group="clipx.options")
    for entry in sorted(found, key=lambda entry: (entry.module.partition(".")[0] not in plugins.OURS, entry.value)):
        plugins.installed.add(entry.module.partition(".")[0])
        if (missing := _missing_part(entry.module)) is not None:
            missing_parts.add(missing)
            continue
        _discovering.append(entry.module)
        try:
            with plugins.calls():
                module = entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.value
            reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{entry.value}, which the installed package {package} names under clipx.options, cannot be imported "
                f"({' '.join(reason.split())}): correct or uninstall the package"
            ) from error
        finally:
            _discovering.pop()
        folder = Path(module.__file__).parent / "conf"
        if folder.is_dir():
            check_new_names(folder, folders)
            folders.append(folder)
    if folders:
        Plugins.instance().register(_InstalledFolders)
    return tuple(folders)


def _missing_part(module: str) -> str | None:
    """Returns the highest package above a module of clipx that was removed; None if the module is there."""
    names = module.split(".")
    parts = [PACKAGE.joinpath(*names[1:end]) for end in range(2, len(names) + 1)] if names[0] == PACKAGE.name else []
    absent = next((part for part in parts if not part.is_dir() and not part.with_suffix(".py").is_file()), None)
    return None if absent is None else ".".join((PACKAGE.name, *absent.relative_to(PACKAGE).parts))


class _InstalledFolders(SearchPathPlugin):
    """Adds the folders of installed packages to those in which Hydra searches configuration files."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in discover_installed():
            search_path.append("clipx.options", f"file://{folder}")


def missing_text() -> str:
    """Returns a clause for the error of an option that does not exist: the parts of clipx that are not there."""
    names = ", ".join(sorted(missing_parts))
    return f"; it may be in {names}, which is not installed: install clipx again" if names else ""


def option_files(group: str, folders: Sequence[Path] = ()) -> dict[str, Path]:
    """Returns the YAML file of each option of a group by name: those of clipx, of installed packages, and in `folders`.

    `group`: as in an override, `model/text`.
    """
    searched = (CONF_DIR, *discover_installed(), *folders)
    found = {path.stem: path for folder in searched for path in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def check_new_names(folder: Path, others: Sequence[Path] = ()) -> None:
    """Raises ConfigError for an option of a folder with the name of an option that Hydra finds before.

    `others`: folders of installed packages, which are searched after that of clipx.
    """
    for path in sorted(folder.rglob("*.yaml")):
        name = path.relative_to(folder)
        for of, whose in ((CONF_DIR, "clipx"), *((other, other.parent.name) for other in others)):
            other = not (of / name).is_file() or (of / name).samefile(path)
            reason = f"beside the option {name.with_suffix('')} of {whose}"
            require_effect(other, str(path), reason, "give it another name")


def load_folder(folder: Path) -> None:
    """Imports the modules next to the YAML files of a user's folder of --config-dir, which register their options."""
    for form in ("*/*.yaml", *(f"{parent}/*/*.yaml" for parent in ("hydra", *NESTED_OPTIONS))):
        for path in sorted(folder.glob(form)):
            if path.with_suffix(".py").is_file():
                plugins.load(folder.absolute(), path.parent.relative_to(folder).as_posix(), path.stem)


_declared: dict[str, dict[str, str]] = {}  # modules of the kinds of each group, see `declare`


def declare(group: str, module: str, *names: str) -> None:
    """Names the module that registers kinds of a group. It is imported when one of them is looked up.

    For kinds of clipx without a module of their name, and for those of installed packages.
    """
    _declared.setdefault(group, {}).update(dict.fromkeys(names, module))


def load_options(group: str, kind: str | None = None) -> None:
    """Imports the module of clipx, or the declared one, that registers a kind of a group. None: of all kinds.

    A group and its package share a name, and so do an option and its module: `conf/objective/infonce.yaml` and
    `clipx/objective/infonce.py`. Options without a separate module are in the group's `spec.py`, in the group's module
    if the group is not a package, or in a module that is declared, as `clipx/objective/fastclip.py`.
    """
    if not group or kind in _registered(group):  # commands register their configurations
        return
    if not _discovering:  # a module that is being discovered may look up what is registered so far
        discover_installed()
    files = sorted((CONF_DIR / group).glob("*.yaml"))
    names = [path.stem for path in files if kind in (None, path.stem)]
    for module in (group, f"{group}.spec", *(f"{group}.{name}" for name in names)):
        if PACKAGE.joinpath(*module.split(".")).with_suffix(".py").is_file():
            importlib.import_module(f"clipx.{module}")
    for name, module in list(_declared.get(group, {}).items()):
        if kind in (None, name):
            with plugins.calls():
                importlib.import_module(module)


def _registered(group: str) -> dict[str, type[Any]]:
    schema = ConfigStore.instance().repo.get("schema", {})
    return {
        name.removesuffix(".yaml"): typing.cast("type[Any]", OmegaConf.get_type(stored.node))
        for name, stored in (schema.get(group, {}) if group else schema).items()
        if not isinstance(stored, dict)
    }


def kinds(group: str) -> dict[str, type[Any]]:
    """Returns the spec class of each kind of a group. `group` "": of the commands whose modules are imported."""
    load_options(group)
    return _registered(group)


def spec_class(group: str, kind: Any) -> type[Any]:
    """Returns the spec class registered for a kind of a group. Raises ConfigError."""
    load_options(group, str(kind))
    found = _registered(group).get(str(kind))
    if found is None:
        raise ConfigError(
            f"{group}.kind={kind} is not registered: choose one of {', '.join(sorted(kinds(group)))}, "
            f"or give a plug-in's folder by --config-dir, or install its package{missing_text()}"
        )
    return found
