"""Loads the configuration of a finished or running run, checks its checkpoints, and waits for their uploads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.checkpoint.resume import Resume
from clipx.checkpoint.spec import CheckpointSpec
from clipx.config.saved import from_dict, to_dict
from clipx.data.spec import Dataset, open_on_all_ranks
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError, ConfigError, NotSynced
from clipx.run.directory import RunDir
from clipx.trainer.spec import RunSpec

if TYPE_CHECKING:
    from clipx.checkpoint.manager import CheckpointManager


def load_run(run_dir: Path) -> RunSpec:
    """Returns the configuration that a run directory was trained with. Raises CheckpointError if there is none."""
    found = RunDir(run_dir)
    if not found.holds_run:
        raise CheckpointError(f"run={run_dir} holds no run (no config.yaml): check the path")
    return from_dict(RunSpec, found.saved())


def open_pinned_data(spec: RunSpec, comm: Comm) -> Dataset:
    """Opens the training data: what moves, such as a branch of a repository, as the resumed run read it. Collective.

    `spec.data` gets the pinned versions, which are saved with the run.
    """

    def pin() -> dict[str, Any]:
        saved = resumed_run(spec)
        return to_dict(spec.data.pinned({} if saved is None else to_dict(saved.data)))

    spec.data = spec.data.pinned(comm.run_on_main(pin))  # keeps what differs between ranks, which is an error
    return open_on_all_ranks(spec.data, comm)


def pin_normalization(spec: RunSpec, comm: Comm) -> None:
    """Sets model.image.mean and std where they are null: to those of the run that is resumed, of model.image.weights,
    or of CLIP. Collective. Raises ClipxError for weights that cannot be read."""
    from clipx.weights.tower import normalization_of  # imports torch, which clipx.check does not need

    image = spec.model.image

    def pin() -> dict[str, list[float]]:
        saved = resumed_run(spec) if None in (image.mean, image.std) else None
        return normalization_of(image) if saved is None else saved.model.image.normalization

    for key, value in comm.run_on_main(pin).items():
        if getattr(image, key) is None:  # on this rank: a value that differs between ranks is an error later
            setattr(image, key, value)


def resumed_run(spec: RunSpec) -> RunSpec | None:
    """Returns the run that is resumed, None for a new run. Raises CheckpointError."""
    run_dir = Path(spec.run_dir)
    if not (Resume.parse(spec.resume).enabled and RunDir(run_dir).has_begun):
        return None
    try:
        return load_run(run_dir)
    except ConfigError as error:
        raise CheckpointError(f"{run_dir} cannot be resumed ({error}): restore its config.yaml") from error


def check_sources(
    state: Mapping[str, Any], run_dir: Path, fingerprint: str, teacher: str | None, teacher_option: str | None
) -> None:
    """Raises CheckpointError if the run of a checkpoint's state had other data or another teacher.

    `fingerprint`: of the data. `teacher`: digest of the teacher, None without one.
    """
    if state["data"] != fingerprint:
        (whole, _, chosen), (whole_before, _, chosen_before) = (
            text.partition("-selected-") for text in (fingerprint, state["data"])
        )
        what = "the data differs from that"
        if whole == whole_before and (chosen or chosen_before):
            what = "the samples that data.keep, data.where and data.weights select differ from those"
        raise CheckpointError(
            f"{what} of {run_dir} (fingerprint {fingerprint}, in the checkpoint {state['data']}): "
            "restore it, or start a new run"
        )
    if teacher is not None and state.get("teacher") != teacher:
        raise CheckpointError(
            f"{teacher_option} is not the teacher of {run_dir} (digest {teacher}, in the checkpoint "
            f"{state.get('teacher')}): give that teacher, or start a new run"
        )


def finish_uploads(checkpoints: CheckpointManager, spec: CheckpointSpec) -> None:
    """Waits for the uploads at the end of a run. Raises NotSynced if they are incomplete then. Collective."""
    if not checkpoints.wait_for_uploads():
        raise NotSynced(
            f"the run is finished, but its upload to {checkpoints.url} is incomplete after checkpoint.sync_timeout_s="
            f"{spec.sync_timeout_s:g}: all local files are complete; once the storage is reachable, the same command "
            "with resume=auto uploads the rest"
        )
