"""Hydra plug-in for `hydra/sweeper=clipx_optuna`.

Imports little, because every Hydra program on this machine imports it. `clipx_launch.search` implements the sweeper.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig


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
