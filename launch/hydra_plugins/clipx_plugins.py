"""Hydra plug-ins: `hydra/launcher=clipx_slurm`, `clipx_local` and `clipx_torchrun`, `hydra/sweeper=clipx_optuna`.

Hydra searches the namespace package `hydra_plugins`, which has no __init__, for launchers and sweepers. Imports little,
because every Hydra program on this machine imports it. `clipx_launch` implements them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from clipx_launch.sweep import Watcher


class ClipxLauncher(Launcher):
    """Launcher of all options of `hydra/launcher=…`. It ignores its arguments: it reads and checks its options in the
    config, whose `launch` it calls."""

    _prints = False

    def __init__(self, **_: Any) -> None: ...

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from clipx.storage.local import check_folder

        folder = Path(config.hydra.sweep.dir)
        # Hydra creates this folder, but does not explain a failure.
        check_folder(folder, f"the sweep's folder {folder}", "set hydra.sweep.dir to")
        self._folder, self._new = folder, [path for path in (folder, *folder.parents) if not path.exists()]
        self._context, self._config = copy(hydra_context), config
        # clipx_launch composes each point and lists all that fail. The sweeper would stop at the first.
        loader = copy(hydra_context.config_loader)
        loader.load_sweep_config = lambda master_config, sweep_overrides: master_config  # type: ignore[method-assign]
        hydra_context.config_loader = loader

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self.launch_points(dict(enumerate(job_overrides, start=initial_job_idx)))

    def launch_points(
        self, overrides: Mapping[int, Sequence[str]], watcher: Watcher | None = None
    ) -> Sequence[JobReturn]:
        """Launches points by number. `watcher` reads their state until they have ended."""
        from clipx_launch.sweep import launch

        hydra_file = self._folder / "multirun.yaml"
        with suppress(FileNotFoundError):  # a search has none
            hydra_file.chmod(0o600)  # it has the environment of the points
        try:
            return launch(self._context, self._config, overrides, watcher, self._prints)
        finally:
            # No point was prepared: after an error, dry_run or a printed torchrun script.
            if self._folder in self._new and not (self._folder / ".launch").exists():
                hydra_file.unlink(missing_ok=True)
                with suppress(OSError):  # it holds other files
                    for path in self._new:
                        path.rmdir()


class SlurmScriptPrinter(ClipxLauncher):
    """Launcher of `clipx-sweep script`, which prints the script of the points."""

    _prints = True


class OptunaSweeper(Sweeper):
    """Sweeper of `hydra/sweeper=clipx_optuna`. It ignores its arguments: it reads and checks its options in the
    config."""

    def __init__(self, **_: Any) -> None: ...

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._config, self._task = copy(hydra_context), config, task_function

    def sweep(self, arguments: list[str]) -> None:
        from clipx_launch.search.check import check_packages

        check_packages(self._config)
        from clipx_launch.search.search import search

        search(self._context, self._config, self._task, arguments)
