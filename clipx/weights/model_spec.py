"""Options of the commands that read weights of any kind: the model of weights without a configuration."""

from __future__ import annotations

from typing import Any

from clipx.config.specs import frozen
from clipx.errors import require_effect, without_effect
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
            given = f"model.{key}={location}"
            require_effect(location is None, given, "on weights that another option names")
        locks = model.lock_options
        require_effect(not locks, f"model.{locks}", "where nothing is trained")

    def check_unused(self, place: str) -> None:
        """Raises ConfigError if the model of weights with a configuration is given. `place`: option and location."""
        if self.model is not None:
            described = f"on {place}, whose configuration describes its model"
            raise without_effect(f"model={self.model.name}", described)
