"""Launches a sweep with a launcher of another package or of a --config-dir folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn
from hydra.types import HydraContext

from clipx.config.compose import checked
from clipx_launch.options import LaunchSpec
from clipx_launch.sweep import Overrides, Sweep, Watcher

if TYPE_CHECKING:
    from omegaconf import DictConfig


def launch(
    context: HydraContext, config: DictConfig, overrides: Overrides, watcher: Watcher | None = None
) -> Sequence[JobReturn]:
    """Composes the points and calls `launch` of the launcher's options. Raises ClipxError."""
    spec: LaunchSpec = checked(config.hydra.launcher, "hydra.launcher.")
    return spec.launch(Sweep.compose(context, config, overrides, watcher))
