"""Normalization of the pixels of a run, before its model is built."""

from __future__ import annotations

from clipx.distributed.comm import Comm
from clipx.trainer.saved_run import resumed_run
from clipx.trainer.spec import RunSpec
from clipx.weights.tower import normalization_of


def pin_normalization(spec: RunSpec, comm: Comm) -> None:
    """Sets model.image.mean and std where they are null: to those of the run that is resumed, of model.image.weights,
    or of CLIP. Collective. Raises ClipxError for weights that cannot be read."""
    image = spec.model.image

    def pin() -> dict[str, list[float]]:
        saved = resumed_run(spec) if None in (image.mean, image.std) else None
        return normalization_of(image) if saved is None else saved.model.image.normalization

    for key, value in comm.run_on_main(pin).items():
        if getattr(image, key) is None:  # on this rank: a value that differs between ranks is an error later
            setattr(image, key, value)
