"""Sources of Hydra's configuration: YAML files, and the schemas of options, whose modules are imported on demand.

Files are read bounded in time and memory: a folder of --config-dir may be of somebody else.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins

from clipx import compat
from clipx.config.registry import CONF_DIR, load_options
from clipx.config.safe_yaml import check_size
from clipx.errors import ConfigError
from clipx.storage.safe_json import read_regular

_LARGEST = 1 << 20  # bytes
_LONGEST = 300  # characters of a reason
latest: Path | None = None
"""File that was read last."""


def register() -> None:
    """Registers the sources in place of Hydra's."""
    Plugins.instance()  # imports the plug-ins of Hydra, its own sources among them
    types = compat.SourcesRegistry.instance().types
    for source in (FileConfigSource, StructuredConfigSource):
        types[source.scheme()] = source  # `register` would keep Hydra's


class FileConfigSource(compat.FileConfigSource):
    """Folder of configuration files."""

    def load_config(self, config_path: str) -> Any:
        global latest
        latest = path = Path(os.path.realpath(Path(self.path) / f"{config_path.removesuffix('.yaml')}.yaml"))
        if path.is_relative_to(CONF_DIR):
            return super().load_config(config_path)
        try:
            check_size(read_regular(path, _LARGEST).decode())
            return super().load_config(config_path)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            # ValueError: no UTF-8, or impossible numbers
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())[:_LONGEST]
            raise ConfigError(f"{path} cannot be read as a configuration ({reason}): correct the file") from error


class StructuredConfigSource(compat.StructuredConfigSource):  # Hydra looks for a class of this name
    """Registered schemas. Looking up one imports the module of its option."""

    def is_config(self, config_path: str) -> bool:
        _load(*config_path.split("/"))
        return super().is_config(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        _load(*config_path.split("/"), None)
        return super().list(config_path, results_filter)

    def __deepcopy__(self, memo: dict[int, Any]) -> StructuredConfigSource:
        """Returns itself: a copy would hold a copy of all schemas, a sixth of the time of a composition."""
        return self


def _load(root: str, *names: str | None) -> None:
    """Imports the options for `schema`, GROUP and a kind; None: for all kinds of the group."""
    if root == "schema" and len(names) == 2 and names[0]:
        load_options(names[0], names[1])
