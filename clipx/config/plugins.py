"""Code of other authors: modules next to the YAML files of --config-dir folders, and modules of installed packages.

The former are imported as `clipx.config.plugins.<group>.<name>`. Their folders are listed in the environment variable
CLIPX_PLUGINS, so that a run's other processes (loader workers, jobs of a sweep) find them too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from clipx.errors import ClipxError, ConfigError

_FOLDERS = "CLIPX_PLUGINS"
OURS = ("clipx", "clipx_launch")  # packages that are no plug-ins
_LONGEST = 400  # characters of another author's error

__path__ = [folder for folder in os.environ.get(_FOLDERS, "").split(os.pathsep) if folder]

installed: set[str] = set()
"""Packages that are named under the entry point `clipx.options`."""


def load(folder: Path, group: str, name: str) -> ModuleType:
    """Imports `<folder>/<group>/<name>.py` once, and returns the module. `folder` is absolute. Raises ConfigError."""
    if str(folder) in __path__:
        __path__.remove(str(folder))
    __path__.insert(0, str(folder))  # the newest folder first: another one may use the same names
    os.environ[_FOLDERS] = os.pathsep.join(__path__)
    full_name = f"{__name__}.{group.replace('/', '.')}.{name}"
    known = sys.modules.get(full_name)
    if known is not None and known.__file__ != str(folder / group / f"{name}.py"):
        del sys.modules[full_name]
    with calls():
        return importlib.import_module(full_name)


@contextlib.contextmanager
def calls() -> Iterator[None]:
    """Context that may run code of plug-ins: what they print goes to stderr, and what they raise is a ConfigError."""
    with contextlib.redirect_stdout(sys.stderr):  # standard output may be a result, as of --cfg job
        try:
            yield
        except BaseException as error:
            if (found := error_of(error)) is not None:
                raise found from error
            raise


def error_of(error: BaseException) -> ConfigError | None:
    """Returns the error for an exception that a plug-in raised, with its name and place. None for any other.

    Of the frames of clipx and of plug-ins the innermost decides: a signal may end clipx while a plug-in runs.
    """
    if isinstance(error, ClipxError | KeyboardInterrupt):
        return None
    if isinstance(error, SyntaxError) and error.filename and (name := _file_name(error.filename)):
        return _worded(name, error, f"{error.filename}:{error.lineno}")
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = str(frame.f_globals.get("__name__"))
        if (name := _module_name(module)) is not None:
            return _worded(name, error, f"{frame.f_code.co_filename}:{line}")
        if module.partition(".")[0] in OURS and module != __name__:
            return _lacking(error, frame.f_locals.get("self"), frame.f_code.co_name)
    return None


def _lacking(error: BaseException, instance: object, method: str) -> ConfigError | None:
    """Returns the error for a class of a plug-in without a method, which the base class in clipx names."""
    name = _module_name(type(instance).__module__)
    if name is None or not isinstance(error, NotImplementedError):
        return None
    return ConfigError(f"the plug-in {name} has no {type(instance).__name__}.{method}, which is needed: define it")


def _module_name(module: str) -> str | None:
    """Returns the name of a plug-in by a module of it: GROUP/NAME, or its package. None for other modules."""
    first = module.partition(".")[0]
    if module.startswith(f"{__name__}."):
        return module.removeprefix(f"{__name__}.").replace(".", "/")
    other = first == "hydra_plugins" and module != "hydra_plugins.clipx_plugins"
    return module if other else first if first in installed - set(OURS) else None


def _file_name(file: str) -> str | None:
    """Returns the name of a plug-in by a file of it, which cannot be imported. None for other files."""
    path = Path(file)
    folder = next((folder for folder in __path__ if path.is_relative_to(folder)), None)
    if folder is not None:
        return path.relative_to(folder).with_suffix("").as_posix()
    return next((name for name in path.parts if name in installed - set(OURS) | {"hydra_plugins"}), None)


def _worded(name: str, error: BaseException, place: str) -> ConfigError:
    text = " ".join(str(error).split())[:_LONGEST]
    what = f"raised {type(error).__name__}{f': {text}' if text else ''}"
    if isinstance(error, SystemExit):
        what = f"ended the program by sys.exit({error.code!r:.{_LONGEST}})"
    return ConfigError(f"the plug-in {name} {what} ({place}): correct it; HYDRA_FULL_ERROR=1 prints the traceback")
