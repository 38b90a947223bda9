"""Start of a run: checks before torch is imported, which takes seconds, and once the ranks are connected; its spec as
it is saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.config.duration import Length
from clipx.config.saved import from_dict, to_dict
from clipx.errors import CheckpointError, ConfigError, require
from clipx.evaluator.spec import check_data
from clipx.trainer.spec import RunSpec
from clipx.trainer.stages import Stages

if TYPE_CHECKING:
    from clipx.distributed.comm import Comm


def check_start(spec: RunSpec) -> None:
    """Raises ClipxError for what a start needs beyond a complete configuration, as far as it is known at once.

    The environment of the launcher, the location of the data, the device's type if an option names it, the length of
    generated data; and files, if there is one rank: several must not end one by one, and may see different files. The
    trainer finds each of these errors too, with others. Writes nothing.
    """
    ranks = spec.distributed.check_launch().world
    check_plan(spec, ranks)
    if ranks == 1:
        _check_files(spec)


def check_plan(spec: RunSpec, ranks: int) -> None:
    """Raises ConfigError for what `check_start` knows of a run on so many ranks without its environment and files."""
    spec.check_ranks(ranks)
    check_data(spec.data, spec.active_evaluators, files=False, trains=True)
    if (device := spec.distributed.device) != "auto":
        for group in (spec.data, spec.precision, spec.objective, spec.compile):
            group.check_device_type(device)
    if spec.data.generated is not None:
        plan_run(spec, spec.data.generated)


def check_on_ranks(spec: RunSpec, comm: Comm) -> None:
    """Raises ClipxError for what the number of ranks, their memory and devices, the run directory, or remote storage do
    not allow. Collective."""
    from clipx.checkpoint.manager import check_storage
    from clipx.run.directory import RunDir
    from clipx.trainer.data_side import check_loading

    comm.run_on_main(RunDir(Path(spec.run_dir)).check_files)
    check_storage(spec.checkpoint, spec.run_dir, spec.resume_point.url, comm)
    spec.check_ranks(comm.world)
    check_loading(spec, comm)


def plan_run(spec: RunSpec, samples: int) -> Stages:
    """Returns the stages of a run on so many training samples. Raises ConfigError if it is too short."""
    batch = spec.data.batch_size
    require(
        batch <= samples,
        f"data.batch_size={batch} is larger than the data set of {samples:,} samples: use at most {samples} or more "
        "data",
    )
    total = spec.whole.samples(Length(samples, batch))
    require(total >= batch, f"duration={spec.duration} is less than one step of {batch} samples: train longer")
    stages = Stages.build(spec, Length(samples, batch, total))
    spec.schedule.check_fits(spec.whole, stages.length)
    for name, evaluator in spec.active_evaluators.items():
        evaluator.cadence.on(stages.length, f"evaluator.{name}.every")
    spec.early_stopping.check(spec.active_evaluators, spec.objective.has_head, spec.whole, stages.length)
    spec.profiler.check_fits(stages.steps_total)
    return stages


def _check_files(spec: RunSpec) -> None:
    from clipx.run.directory import RunDir

    run, resume = RunDir(Path(spec.run_dir)), spec.resume_point
    run.check_files()
    if spec.checkpoint.remote is None and resume.url is None:  # else a run may be there alone
        run.check_state(resume)
    check_data(spec.data, spec.active_evaluators, files=True, trains=True)
    if resume.enabled:  # a run that continues loads no initial weights
        return
    image, text = spec.model.image, spec.model.text
    locations = {"model.weights": spec.model.weights, "model.image.weights": image.weights}
    locations |= {"model.text.weights": text.weights, "teacher.weights": spec.teacher.weights}
    for key, location in locations.items():
        if location is not None:
            from clipx.weights.spec import check_exists

            check_exists(location, key)


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
    from clipx.run.directory import RunDir

    if not (spec.resume_point.enabled and RunDir(run_dir).has_begun):
        return None
    from clipx.trainer.saved_run import saved_values

    try:
        return from_dict(RunSpec, saved_values(run_dir, f"resume={spec.resume}"))
    except ConfigError as error:
        raise CheckpointError(f"{run_dir} cannot be resumed ({error}): restore its config.yaml") from error
