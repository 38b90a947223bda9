"""Stages of a run: spans with a different image size, batch size, learning rate or patch dropout.

Progress is counted in samples, so that the order of samples, the schedules and the cadences do not depend on stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from clipx.config.duration import Duration, Interval, Length, a_duration
from clipx.config.options import option
from clipx.config.specs import frozen
from clipx.data.spec import DataSpec, require_multiple
from clipx.errors import CheckpointError, require, require_effect
from clipx.model.spec import ModelSpec, Varying
from clipx.schedule import LearningRate

if TYPE_CHECKING:
    from clipx.trainer.spec import RunSpec

# ----------------------------------------------------------------------------------------------------- options


@frozen
class StageSpec:
    """A span of the run with settings that differ from the stages next to it. It starts where the previous stage ends.

    The defaults are the settings of the run.
    """

    until: str | None = option(None, check=a_duration(share=True, zero=True))
    """End of the stage: a duration from the start of the run (16ep, 5000st, 6.4e9sa) or a share of the run (50%),
    rounded up to a whole step. After the end of the previous stage and before the end of the run. null in the last
    stage, which ends with the run; required in all others."""

    image_size: int | None = option(None, ge=8, unit="pixels")
    """Width and height of the training images. null: model.image.size. The last stage must
    train at model.image.size, at which the run is evaluated."""

    batch_size: int | None = option(None, ge=2, hint="one sample has no negatives")
    """Samples per optimizer step over all ranks, like data.batch_size: divisible by ranks ×
    data.micro_batches, and at most the size of the data set. null: data.batch_size."""

    lr_scale: float = option(1.0, gt=0, hint="1 is the schedule's rate")
    """Factor of the schedule's learning rate. 1: the rate of the schedule."""

    patch_dropout: float = option(0.0, ge=0, lt=1, hint="0.5 drops half of the patches")
    """Share of each image's patches that training drops at random, like model.patch_dropout. Must be 0 if the model has
    a patch dropout; conversely, if one stage sets it, 0 in another stage drops no patches."""

    def end(self, key: str) -> Duration | None:
        """Returns the parsed `until`, None without. Raises ConfigError, which names `key`."""
        return None if self.until is None else Duration.parse(self.until, key, share=True)


def check_stages(specs: Sequence[StageSpec], model: ModelSpec, data: DataSpec, whole: Duration) -> None:
    """Checks the stages as far as possible at composition. Raises ConfigError."""
    if not specs:
        return
    require(len(specs) > 1, "stages has one stage, which is the whole run: set its options in the run itself")
    for i, batch in enumerate(spec.batch_size or 0 for spec in specs):
        micro = data.micro_batches
        require_multiple(f"stages.{i}.batch_size", batch, micro, f"data.micro_batches={micro}")
    for i, (one, other) in enumerate(pairwise(specs)):
        require(one.until is not None, f"stages.{i} has no end, but stages.{i + 1} follows it: give it, e.g. until=50%")
        require(
            _settings(one, model, data) != _settings(other, model, data),
            f"stages.{i + 1} has the settings of stages.{i}: change image_size, batch_size, lr_scale or patch_dropout, "
            "or remove one of the two",
        )
    last, end, size = f"stages.{len(specs) - 1}", specs[-1].until, specs[-1].image_size
    require_effect(end is None, f"{last}.until={end}", "in the last stage, which ends with the run")
    require(
        size in (None, model.image.size),
        f"{last}.image_size={size} is not model.image.size={model.image.size}, at which the run is evaluated: remove "
        "it from the last stage",
    )
    own = [f"stages.{i}.patch_dropout={spec.patch_dropout}" for i, spec in enumerate(specs) if spec.patch_dropout]
    require(
        not (own and model.drops_patches),
        f"{' '.join(own[:1])} and model.patch_dropout={model.patch_dropout} exclude each other: set it for each stage, "
        "or for the whole run",
    )
    _check_order(specs, whole, Length(0, data.batch_size))


def _settings(spec: StageSpec, model: ModelSpec, data: DataSpec) -> tuple[int | None, int, float, float]:
    """Returns image size, None for images of no common size, batch size, factor of the learning rate, and patch
    dropout."""
    size = spec.image_size or model.image.size if model.image.kind.squares else None
    return size, spec.batch_size or data.batch_size, spec.lr_scale, spec.patch_dropout


def _check_order(specs: Sequence[StageSpec], whole: Duration, length: Length) -> None:
    """Raises ConfigError unless each stage ends after the previous stage and before the end of the run.

    Skips ends whose share of the run is not known yet.
    """
    before, ended = "the start of the run", 0.0
    for i, spec in enumerate(specs):
        key = f"stages.{i}.until"
        end = spec.end(key)
        share = None if end is None else end.share(whole, length)
        if share is None:
            continue
        require(
            ended < share,
            f"{key}={spec.until} is not after {before}: give stages in ascending order of their ends",
        )
        require(
            share < 1,
            f"{key}={spec.until} is not before the end of duration={whole.text}, which leaves no samples for the next "
            "stage: end it earlier, or train longer",
        )
        before, ended = f"{key}={spec.until}", share


# ------------------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True, slots=True)
class Stage:
    """The samples [start, end) of a run, in whole steps, and their settings."""

    start: int
    end: int
    image_size: int | None  # None: images have no common size
    batch_size: int
    lr_scale: float
    patch_dropout: float

    @property
    def steps(self) -> int:
        """Optimizer steps of the stage."""
        return (self.end - self.start) // self.batch_size


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step: its position in the run, and the settings that follow from it."""

    number: int  # steps before it
    start: int  # samples seen before it
    end: int  # and after it
    batch_size: int  # over all ranks
    image_size: int | None  # None: images have no common size
    patch_dropout: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Stages:
    """Settings of each step as a function of the samples seen before it. A run without stages has a single stage."""

    spans: Sequence[Stage]
    length: Length
    schedule: LearningRate  # of the run, without the factors of the stages
    course: Callable[[int], float] | None  # patch dropout of the model; None: the stages set it
    varying: Varying
    logs: Interval  # between two logs

    @classmethod
    def build(cls, spec: RunSpec, length: Length) -> Stages:
        """Divides the run of `length.total` samples into stages of whole steps. Raises ConfigError.

        An end within a step is moved to the end of the step; an incomplete last step of the run is dropped.
        `length.total` is `duration` in samples.
        """
        model = spec.model
        _check_order(spec.stages, spec.whole, length)
        model.check_fits(spec.whole, length)
        spans: list[Stage] = []
        for i, given in enumerate(spec.stages or [StageSpec()]):
            size, batch, lr_scale, dropout = _settings(given, model, spec.data)
            start = spans[-1].end if spans else 0
            end = given.end(f"stages.{i}.until")
            steps = (length.total - start) // batch if end is None else -(-(end.samples(length) - start) // batch)
            require(
                batch <= length.epoch,
                f"stages.{i}.batch_size={batch} is larger than the data set of {length.epoch:,} samples: use at most "
                f"{length.epoch} or more data",
            )
            require(
                steps > 0,
                f"stages.{i} starts at sample {start:,} and is shorter than one step of {batch:,}: end it later",
            )
            spans.append(Stage(start, start + steps * batch, size, batch, lr_scale, dropout))
        own = any(stage.patch_dropout for stage in spans)
        sizes = sorted({stage.image_size for stage in spans if stage.image_size} - {model.image.size})
        length = replace(length, total=spans[-1].end)
        schedule = spec.schedule.build(spec.optimizer.lr, length)
        course = None if own else model.patch_dropout_over(length)
        logs = Interval(max(1, spec.log_interval.samples(length)), at_end=True)
        return cls(spans, length, schedule, course, Varying(own or model.drops_patches, tuple(sizes)), logs)

    @property
    def total(self) -> int:
        """Samples of the run."""
        return self.spans[-1].end

    @property
    def steps_total(self) -> int:
        """Optimizer steps of the run."""
        return sum(stage.steps for stage in self.spans)

    def at(self, samples_seen: int) -> Step:
        """Returns the step after so many samples, with its settings. After the end of the run: a step like the last."""
        stage = self._stage(samples_seen)
        return Step(
            number=self.steps(samples_seen),
            start=samples_seen,
            end=samples_seen + stage.batch_size,
            batch_size=stage.batch_size,
            image_size=stage.image_size,
            patch_dropout=stage.patch_dropout if self.course is None else self.course(samples_seen),
            learning_rate=self.schedule(samples_seen) * stage.lr_scale,
        )

    def steps(self, samples_seen: int) -> int:
        """Returns the number of optimizer steps after so many samples."""
        now = self._stage(samples_seen)
        before = sum(stage.steps for stage in self.spans if stage.end <= now.start)
        return before + (samples_seen - now.start) // now.batch_size

    def remaining(self, samples_seen: int) -> Iterator[tuple[Stage, range]]:
        """Yields the remaining stages, each with its remaining samples."""
        for stage in self.spans:
            if samples_seen < stage.end:
                yield stage, range(max(samples_seen, stage.start), stage.end)

    def last_step(self, samples: int) -> int:
        """Returns the samples seen at the end of the last step that ends within so many samples."""
        return samples - (samples - self._stage(samples).start) % self._stage(samples).batch_size

    def metrics(self, step: Step) -> dict[str, float]:
        """Returns the settings to log for a step, without those constant in the run but the learning rate."""
        size = {} if step.image_size is None else {"train/image_size": step.image_size}
        return {
            "train/lr": step.learning_rate,
            **({**size, "train/batch_size": step.batch_size} if len(self.spans) > 1 else {}),
            **({"train/patch_dropout": step.patch_dropout} if self.varying.patch_dropout else {}),
        }

    def check_resumes(self, samples_seen: int, step: int) -> None:
        """Raises CheckpointError if the steps before a checkpoint differ from those of this run."""
        if self.steps(samples_seen) != step or self.last_step(samples_seen) != samples_seen:
            raise CheckpointError(
                f"the checkpoint is of step {step:,} after {samples_seen:,} samples, but stages and duration now give "
                f"step {self.steps(samples_seen):,}: do not change the ends and batch sizes of finished stages, and "
                "give the ends in samples (12.8e9sa) if duration changes"
            )

    def describe(self) -> str:
        """Returns a description of the stages in one line."""
        return "; ".join(
            f"{s.steps:,} steps of {s.batch_size:,}{'' if s.image_size is None else f' at {s.image_size} pixels'}, up "
            f"to sample {s.end:,}"
            for s in self.spans
        )

    def _stage(self, samples_seen: int) -> Stage:
        return next((stage for stage in self.spans if samples_seen < stage.end), self.spans[-1])
