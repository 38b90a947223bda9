"""Plug-in modules next to the YAML files of --config-dir folders, imported as `clipx.config.plugins.<group>.<name>`.

The folders are listed in the environment variable CLIPX_PLUGINS, so that a run's other processes (loader workers, jobs
of a sweep) find them too.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

_FOLDERS = "CLIPX_PLUGINS"

__path__ = [folder for folder in os.environ.get(_FOLDERS, "").split(os.pathsep) if folder]


def load(folder: Path, group: str, name: str) -> ModuleType:
    """Imports `<folder>/<group>/<name>.py` once and returns the module. `folder` must be absolute."""
    if str(folder) in __path__:
        __path__.remove(str(folder))
    __path__.insert(0, str(folder))  # the newest folder first: another one may use the same names
    os.environ[_FOLDERS] = os.pathsep.join(__path__)
    full_name = f"{__name__}.{group.replace('/', '.')}.{name}"
    known = sys.modules.get(full_name)
    if known is not None and known.__file__ != str(folder / group / f"{name}.py"):
        del sys.modules[full_name]
    return importlib.import_module(full_name)
