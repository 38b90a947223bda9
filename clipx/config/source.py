"""Reads configuration files for Hydra, bounded in time and memory: a folder of --config-dir may be of somebody else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from hydra.core.plugins import Plugins

from clipx import compat
from clipx.config.registry import CONF_DIR
from clipx.config.safe_yaml import check_size
from clipx.errors import ConfigError
from clipx.storage.safe_json import read_regular

_LARGEST = 1 << 20  # bytes
_LONGEST = 300  # characters of a reason
latest: Path | None = None
"""File that was read last."""


def register() -> None:
    """Registers the source, in place of Hydra's, for all folders of configuration files."""
    Plugins.instance()  # imports the plug-ins of Hydra, its own sources among them
    types = compat.SourcesRegistry.instance().types
    types[FileConfigSource.scheme()] = FileConfigSource  # `register` would keep Hydra's


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
