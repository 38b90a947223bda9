"""Where Hydra looks for launchers: `hydra/launcher=clipx_slurm` and its like. A namespace package: no __init__.

Light, because every Hydra program on this machine imports it. What the launchers do is in `clipx_launch`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.plugins.launcher import Launcher

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig


class _ClipxLauncher(Launcher):
    """Its options are read, and checked, in the configuration that it is set up with."""

    _module = ""  # of clipx_launch

    def __init__(self, **_: Any) -> None: ...

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from clipx.storage.local import ensure_folder

        folder = Path(config.hydra.sweep.dir)
        ensure_folder(
            folder, f"the sweep's folder {folder}", "choose by hydra.sweep.dir"
        )  # which Hydra makes without a word
        self._context, self._config = copy(hydra_context), config
        # clipx_launch composes each point and lists all that cannot be composed. The sweeper would stop at the first.
        unread = copy(hydra_context.config_loader)
        unread.load_sweep_config = lambda master_config, sweep_overrides: master_config  # type: ignore[method-assign]
        hydra_context.config_loader = unread

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        module = importlib.import_module(f"clipx_launch.{self._module}")
        found: Sequence[JobReturn] = module.launch(self._context, self._config, job_overrides, initial_job_idx)
        return found


class SlurmLauncher(_ClipxLauncher):
    _module = "slurm"


class LocalLauncher(_ClipxLauncher):
    _module = "local"


class TorchrunLauncher(_ClipxLauncher):
    _module = "torchrun"
