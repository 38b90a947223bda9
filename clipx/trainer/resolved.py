"""The spec of a run as it is saved: what only the start of the run finds out is part of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from clipx.config.saved import from_dict, to_dict
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError, ConfigError
from clipx.run.directory import RunDir
from clipx.trainer.spec import RunSpec


def resolve(spec: RunSpec, comm: Comm) -> RunSpec:
    """Returns the spec of this run as it is saved: the only change of a spec after its composition. Collective.

    `run_dir`: that of rank 0; the time in it may differ between ranks.
    `model.image.mean` and `std`, where they are null: those of the resumed run, of model.image.weights, or of CLIP.
    `data`: what moves, such as a branch of a repository, as the resumed run read it, else as it is now.
    `precision`: the format that auto chooses on the device of this rank.

    Typed values that differ between ranks, and devices that choose different formats, remain different, an error later.
    Raises ClipxError for a run, weights or a repository that cannot be read.
    """
    image = spec.model.image

    def found() -> tuple[str, dict[str, list[float]], dict[str, Any]]:
        saved = _resumed_run(spec)
        if saved is None and image.weights is not None:
            from clipx.weights.tower import normalization_of

            normalization = normalization_of(image)
        else:
            normalization = (image if saved is None else saved.model.image).normalization
        data = spec.data.pinned({} if saved is None else to_dict(saved.data))
        return spec.run_dir, normalization, to_dict(data)

    run_dir, normalization, data = comm.run_on_main(found)
    missing: dict[str, Any] = {key: value for key, value in normalization.items() if getattr(image, key) is None}
    return replace(
        spec,
        run_dir=run_dir,
        model=replace(spec.model, image=replace(image, **missing)),
        data=spec.data.pinned(data),
        precision=spec.precision.on(comm.device),
    )


def _resumed_run(spec: RunSpec) -> RunSpec | None:
    """Returns the run that is resumed, None for a new run. Raises CheckpointError."""
    run_dir = Path(spec.run_dir)
    if not (spec.resume_point.enabled and RunDir(run_dir).has_begun):
        return None
    from clipx.trainer.saved_run import saved_values

    try:
        return from_dict(RunSpec, saved_values(run_dir, f"resume={spec.resume}"))
    except ConfigError as error:
        raise CheckpointError(f"{run_dir} cannot be resumed ({error}): restore its config.yaml") from error
