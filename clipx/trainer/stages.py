"""The stages of a run: spans of it that train on images of another size, with another batch size, learning rate or
patch dropout. Progress stays in samples, so that their order, the schedules and the cadences know nothing of stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from clipx.config.duration import Duration, Length
from clipx.data.spec import DataSpec, nearest_multiples
from clipx.errors import CheckpointError, require
from clipx.model.spec import ModelSpec, Varying
from clipx.schedule import LearningRate

# ------------------------------------------------------------------------------------------------ what is asked


@dataclass(kw_only=True, slots=True)
class StageSpec:
    """A stage begins where the one before it ends. What it leaves out is as in the rest of the run."""

    # Its end: a duration from the start of the run, or a share of the run (50%), rounded up to a whole step; null in
    # the last stage, which ends with the run.
    until: str | None = None
    image_size: int | None = None  # pixels, square; null: model.image.size, as in the last stage
    batch_size: int | None = None  # as data.batch_size, which null stands for
    lr_scale: float = 1.0  # times the schedule's learning rate
    patch_dropout: float = 0.0  # as model.patch_dropout, which stays 0 where a stage has its own


def check_stages(specs: Sequence[StageSpec], model: ModelSpec, data: DataSpec, duration: str) -> None:
    """All that can be known at composition. Raises ConfigError."""
    if not specs:
        return
    require(len(specs) > 1, "stages has one stage, which is the whole run: set what it changes in the run itself")
    for i, spec in enumerate(specs):
        _check(f"stages.{i}", spec, data.micro_batches)
    for i, (one, other) in enumerate(pairwise(specs)):
        require(one.until is not None, f"stages.{i} has no end, but stages.{i + 1} follows it: give until=50% or so")
        require(
            _trained(one, model, data) != _trained(other, model, data),
            f"stages.{i + 1} trains as stages.{i} does: change image_size, batch_size, lr_scale or patch_dropout, or "
            "leave one of them out",
        )
    last, end, size = f"stages.{len(specs) - 1}", specs[-1].until, specs[-1].image_size
    require(end is None, f"{last}.until={end} has no effect: the last stage ends with the run; leave it out")
    require(
        size in (None, model.image.size),
        f"{last}.image_size={size} is not model.image.size={model.image.size}, at which the run is evaluated: leave it "
        "out in the last stage",
    )
    own = [f"stages.{i}.patch_dropout={spec.patch_dropout}" for i, spec in enumerate(specs) if spec.patch_dropout]
    require(
        not (own and model.drops_patches),
        f"{' '.join(own[:1])} and model.patch_dropout={model.patch_dropout} exclude each other: give a value to each "
        "stage, or one course to the whole run",
    )
    _check_order(specs, duration, Length(0, data.batch_size))


def _check(key: str, spec: StageSpec, micro_batches: int) -> None:
    """The values of one stage by themselves."""
    size, batch = spec.image_size, spec.batch_size
    require(size is None or size >= 8, f"{key}.image_size={size} is too small: give at least 8 pixels")
    require(batch is None or batch >= 2, f"{key}.batch_size={batch} must be at least 2: one sample has no negatives")
    if batch is not None:
        require(
            batch % micro_batches == 0,
            f"{key}.batch_size={batch} is not divisible by data.micro_batches={micro_batches}: "
            f"use {nearest_multiples(batch, micro_batches)}",
        )
    require(
        0 < spec.lr_scale < math.inf,
        f"{key}.lr_scale={spec.lr_scale} must be a number above 0: 1 is the schedule's rate",
    )
    require(
        0 <= spec.patch_dropout < 1,
        f"{key}.patch_dropout={spec.patch_dropout} must lie in [0, 1): 0.5 leaves out half of the patches",
    )


def _trained(spec: StageSpec, model: ModelSpec, data: DataSpec) -> tuple[int, int, float, float]:
    """Image size, batch size, share of the learning rate, patch dropout."""
    size, batch = spec.image_size or model.image.size, spec.batch_size or data.batch_size
    return size, batch, spec.lr_scale, spec.patch_dropout


def _check_order(specs: Sequence[StageSpec], duration: str, length: Length) -> None:
    """Each stage ends after the one before it, and the last with the run. Those that cannot be compared yet pass."""
    whole = Duration.parse(duration, "duration")
    before, ended = "the start of the run", 0.0
    for i, spec in enumerate(specs[:-1]):
        key = f"stages.{i}.until"
        share = Duration.parse(str(spec.until), key, share=True).share(whole, length)
        if share is None:
            continue
        require(
            ended < share,
            f"{key}={spec.until} is not after {before}: stages stand in the order in which they come; move its end",
        )
        require(
            share < 1,
            f"{key}={spec.until} is not before the end of duration={duration}, so that nothing is left for the stage "
            "after it: end it earlier, or train longer",
        )
        before, ended = f"{key}={spec.until}", share


# ----------------------------------------------------------------------------------------------- what is trained


@dataclass(frozen=True, slots=True)
class Stage:
    """The samples [start, end) of a run, in whole steps."""

    start: int
    end: int
    image_size: int
    batch_size: int
    lr_scale: float
    patch_dropout: float

    @property
    def steps(self) -> int:
        return (self.end - self.start) // self.batch_size


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What holds at a number of samples seen, and depends on nothing else. A run without stages is a single one."""

    stages: Sequence[Stage]
    course: Callable[[int], float] | None  # the model's patch dropout; None: the stages have their own
    varying: Varying

    @classmethod
    def build(
        cls, specs: Sequence[StageSpec], model: ModelSpec, data: DataSpec, duration: str, length: Length
    ) -> StagePlan:
        """`length.total` samples, which `duration` is here, in stages of whole steps: an end within a step is moved to
        the end of that step, and what is left of the run's last one is dropped. Raises ConfigError."""
        _check_order(specs, duration, length)
        model.check_fits(duration, length)
        stages: list[Stage] = []
        for i, spec in enumerate(specs or [StageSpec()]):
            size, batch, lr_scale, dropout = _trained(spec, model, data)
            start = stages[-1].end if stages else 0
            if spec.until is None:
                steps = (length.total - start) // batch
            else:
                steps = -(-(Duration.parse(spec.until, "until", share=True).samples(length) - start) // batch)
            require(
                batch <= length.epoch,
                f"stages.{i}.batch_size={batch} is larger than the data set of {length.epoch:,} samples: use at most "
                f"{length.epoch} or more data",
            )
            require(
                steps > 0,
                f"stages.{i} begins at sample {start:,} and ends before a whole step of {batch:,}: make it longer",
            )
            stages.append(Stage(start, start + steps * batch, size, batch, lr_scale, dropout))
        own = any(stage.patch_dropout for stage in stages)
        sizes = sorted({stage.image_size for stage in stages} - {model.image.size})
        course = None if own else model.patch_dropout_over(replace(length, total=stages[-1].end))
        return cls(stages, course, Varying(own or model.drops_patches, tuple(sizes)))

    @property
    def total(self) -> int:
        """Samples of the run."""
        return self.stages[-1].end

    def at(self, samples_seen: int) -> Stage:
        return next((stage for stage in self.stages if samples_seen < stage.end), self.stages[-1])

    def steps(self, samples_seen: int) -> int:
        """Optimizer steps that are done."""
        now = self.at(samples_seen)
        before = sum(stage.steps for stage in self.stages if stage.end <= now.start)
        return before + (samples_seen - now.start) // now.batch_size

    def remaining(self, samples_seen: int) -> Iterator[tuple[Stage, range]]:
        """The stages that are still to be trained, each with its samples."""
        for stage in self.stages:
            if samples_seen < stage.end:
                yield stage, range(max(samples_seen, stage.start), stage.end)

    def patch_dropout(self, samples_seen: int) -> float:
        """The share of an image's patches that the step after so many samples leaves out."""
        return self.at(samples_seen).patch_dropout if self.course is None else self.course(samples_seen)

    def scaled(self, learning_rate: LearningRate) -> LearningRate:
        """The schedule's rate, times that of the stage."""
        return lambda seen: learning_rate(seen) * self.at(seen).lr_scale

    def row(self, samples_seen: int) -> dict[str, float]:
        """What is logged of the step after so many samples; nothing that is the same in all of the run."""
        stage = self.at(samples_seen)
        several = {"train/image_size": stage.image_size, "train/batch_size": stage.batch_size}
        return {
            **(several if len(self.stages) > 1 else {}),
            **({"train/patch_dropout": self.patch_dropout(samples_seen)} if self.varying.patch_dropout else {}),
        }

    def check_resumes(self, samples_seen: int, step: int) -> None:
        """Raises CheckpointError where the steps before a checkpoint were not these."""
        stage = self.at(samples_seen)
        if self.steps(samples_seen) != step or (samples_seen - stage.start) % stage.batch_size:
            raise CheckpointError(
                f"the checkpoint is of step {step:,} after {samples_seen:,} samples, where stages and duration now "
                f"have step {self.steps(samples_seen):,}: leave the ends and batch sizes of stages that are over as "
                "they were, and give them in samples (12.8e9sa) where duration changes"
            )

    def describe(self) -> str:
        """The stages in one line, for a person."""
        return "; ".join(
            f"{s.steps:,} steps of {s.batch_size:,} at {s.image_size} pixels, up to sample {s.end:,}"
            for s in self.stages
        )


def check_ranks(specs: Sequence[StageSpec], data: DataSpec, ranks: int) -> None:
    """Raises ConfigError where so many ranks cannot share a stage's batch evenly."""
    parts = ranks * data.micro_batches
    split = f"{ranks} ranks" + (f" x {data.micro_batches} micro-batches" if data.micro_batches > 1 else "")
    for i, spec in enumerate(specs):
        batch = spec.batch_size or parts
        require(
            batch % parts == 0,
            f"stages.{i}.batch_size={batch} is not divisible by {split}: use {nearest_multiples(batch, parts)}",
        )
