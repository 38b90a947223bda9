"""Model of the configuration that comes with weights, for a run that starts from them: `model=weights`."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from clipx.checkpoint.resume import split_checkpoint
from clipx.errors import CheckpointError
from clipx.model.spec import ModelSpec
from clipx.trainer.saved_run import holds_run, open_run

_OF_TRAINING = {
    "weights",
    "head_weights",
    "head_drop_path",
    "checkpointing",
    "lock",
    "lock_norms",
    "lora",
    "stretch_keep",
    "patch_dropout",
    "patch_dropout_schedule",
    "patch_dropout_end",
    "patch_dropout_final",
}
"""Options that are not part of a model, but of the training in which it was saved."""


def described_model(location: str) -> ModelSpec:
    """Returns the model of the weights at `location`, any value of model.weights, without options of a training.

    Imports torch unless it is a run. Raises ClipxError for weights without a configuration.
    """
    if holds_run(split_checkpoint(location)[0], "model.weights"):
        spec: ModelSpec | None = open_run(location, "model.weights").spec.model
    else:
        from clipx.weights.load import load_weights

        spec = load_weights(location).spec
    if spec is None:
        raise CheckpointError(
            f"model.weights={location} holds weights without a configuration, from which model=weights takes the "
            "sizes: choose their model, e.g. model=vit_b32"
        )
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    towers = {name: _plain(value) for name, value in values.items() if is_dataclass(value)}
    plain: ModelSpec = replace(_plain(spec), **towers)
    return plain


def _plain(spec: Any) -> Any:
    """Returns a spec with the defaults of the options of a training."""
    usual: dict[str, Any] = {}
    for field in fields(spec):
        if field.name in _OF_TRAINING:
            factory: Any = field.default_factory
            usual[field.name] = factory() if field.default is MISSING else field.default
    return replace(spec, **usual)
