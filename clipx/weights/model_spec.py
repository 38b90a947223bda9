"""Options of the commands that read weights of any kind: the model of weights without a configuration."""

from __future__ import annotations

from typing import Any

from clipx.config.specs import frozen
from clipx.errors import ConfigError, require
from clipx.model.spec import ModelSpec

UNUSED = ("objective", "optimizer")
"""Groups of which options of the group model select an option, without effect on these commands."""


@frozen
class WeightsModelSpec:
    """The group model of a command that reads weights."""

    model: ModelSpec | None = None
    """Model of weights without a configuration, such as a bare epoch_32.pt of open_clip's trainer: an option of the
    group with its keys, as in the training. An error for weights with a configuration. null: they have one."""

    objective: Any = None
    """Unused: options of the group model select it. Setting it is an error."""

    optimizer: Any = None
    """Unused: options of the group model select it. Setting it is an error."""

    def __post_init__(self) -> None:
        model = self.model
        if model is None:
            return
        initial = {f"{tower}.weights": location for tower, location in model.tower_weights.items()}
        for key, location in {"weights": model.weights, **initial}.items():
            require(
                location is None,
                f"model.{key}={location} has no effect, because another option names the weights: remove it",
            )
        locks = model.lock_options
        require(not locks, f"model.{locks} has no effect, because nothing is trained: remove it")

    def check_unused(self, place: str) -> None:
        """Raises ConfigError if the model of weights with a configuration is given. `place`: option and location."""
        if self.model is not None:
            raise ConfigError(
                f"model={self.model.name} has no effect on {place}, whose configuration describes its model: remove it"
            )
