"""Options and interface of evaluators, which compute named metrics of a model on held-out data, on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from clipx.config.duration import Cadence
from clipx.config.names import check_metric_part
from clipx.config.options import option
from clipx.config.registry import MISSING, frozen
from clipx.data.spec import TRAINING_OPTIONS, Dataset, DataSpec, check_effect
from clipx.errors import ClipxError, require, with_location

if TYPE_CHECKING:
    from clipx.evaluator.base import Embedder, Metrics


def check_set(key: str, data: DataSpec, learns: bool) -> None:
    """Raises ConfigError if a training option is set for a set.

    Args:
        key: key of the set, for the error message.
        data: the set.
        learns: whether the evaluator learns from a part of the set.
    """
    keys = TRAINING_OPTIONS if learns else (*TRAINING_OPTIONS, "held_out_share")
    check_effect(data, keys, "a set, which is evaluated as a whole", place=key)


def error_at(error: ClipxError, evaluator: str, name: str | None, data: DataSpec) -> ClipxError:
    """Returns an error of a set with its key, and with the full keys of its options. `name`: None for no set."""
    if name is None:
        return error
    place = f"evaluator.{evaluator}.sets.{name}"
    there = with_location(error, place, [f.name for f in dataclasses.fields(data)])
    return there if place in str(there) else type(there)(f"{place}: {there}")


def check_data(
    data: DataSpec | None, evaluators: Mapping[str, EvaluatorSpec], files: bool, trains: bool = False
) -> None:
    """Raises ClipxError for data, or a set of an evaluator, that has no location, and for files that do not exist.

    Args:
        data: data of a command, if any.
        evaluators: {name: evaluator} of the command.
        files: whether this process looks for local files: others of the command may see them where it does not.
        trains: whether the command reads the training samples of `data`.
    """
    given: list[tuple[str, str | None, DataSpec, bool]] = [] if data is None else [("", None, data, trains)]
    for name, one in evaluators.items():
        given += [(name, key, sets, one.learns) for key, sets in one.sets.items()]
    for evaluator, key, spec, whole in given:
        opened = spec if whole else spec.evaluated()
        try:
            opened.check_complete()
            if files:
                opened.check_files()
        except ClipxError as error:
            raise error_at(error, evaluator, key, spec) from None
    for one in evaluators.values() if files else ():
        one.check_files()


@frozen
class EvaluatorSpec:
    """Options of every evaluator.

    A subclass is a dataclass made by `@frozen`. Its fields are the keys `evaluator.KIND.KEY`;
    `evaluate` computes the metrics.

    Args:
        kind: kind of evaluator; set by the choice of an option, e.g. evaluator=[zeroshot].
        every: cadence of the evaluation in epochs, steps or samples (1ep, 500st, 1e6sa), or end, or none.
        batch_size: number of images or texts embedded in one forward pass on each rank.
        held_out: whether to evaluate the held-out samples of the run's data.
        sets: further data sets to evaluate, by name.

    Raises:
        ConfigError: an option is outside of its range, or `check` finds that the data does not fit.
        DataError: `check` or `evaluate` cannot read the data, or too many of its samples are bad.
        NotImplementedError: a subclass has no `evaluate`.

    Example:
        The similarity of each held-out image with its first caption, of a model with random weights:

            >>> from clipx import compose
            >>> from clipx.config import frozen
            >>> from clipx.evaluator import EvaluatorSpec
            >>> from clipx.evaluator.base import Embedder
            >>> @frozen
            ... class SimilaritySpec(EvaluatorSpec):
            ...     kind: str = "similarity"
            ...     def evaluate(self, embedder, data):
            ...         images = embedder.images(data.held_out, self.batch_size)
            ...         text_ND = embedder.texts([texts[0] for texts in images.captions], self.batch_size)
            ...         return {"similarity": (images.image * text_ND).sum(1).mean().item()}
            >>> run = compose("model=tiny", "data=digits", "data.workers=0", "distributed.device=cpu")
            >>> comm = run.distributed.build()
            >>> precision = run.precision.build(comm.device)
            >>> model = run.model.build(comm.device, precision.stored)
            >>> embedder = Embedder.build(model, run.model, run.data, comm, precision, report_bad=lambda bad: None)
            >>> metrics = SimilaritySpec(batch_size=128).evaluate(embedder, run.data.open())
            >>> -1 <= metrics["similarity"] <= 1
            True
    """

    learns: ClassVar[bool] = False
    """Whether the evaluator learns from the training samples of the data that it evaluates."""

    parts: ClassVar[tuple[str, ...]] = ()
    """First parts of the names of its metrics, which sets must not have as names."""

    compared: ClassVar[tuple[str, ...]] = ()
    """Metrics for the comparison of sets and models, higher is better; the most informative one first."""

    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of all metrics of a set, to check keys that name one before training. (): not declared, and not checked."""

    kind: str = MISSING
    """Kind of evaluator; set by the choice of an option, e.g. evaluator=[zeroshot]."""

    every: str = "1ep"
    """Cadence of the evaluation: a duration in epochs, steps or samples (1ep, 500st, 1e6sa), which also evaluates at
    the end of training; end: at the end only; none: never."""

    batch_size: int = option(256, ge=1)
    """Number of images or texts embedded in one forward pass on each rank."""

    held_out: bool = True
    """Whether to evaluate the held-out samples of the run's data. false needs at least one set in sets."""

    sets: dict[str, DataSpec] = field(default_factory=dict)
    """Further data sets to evaluate, by name: +data@evaluator.EVALUATOR.sets.NAME=OPTION adds one. NAME becomes a part
    of its metric names. Each set is evaluated as a whole; options that sample or augment training data are refused."""

    @property
    def cadence(self) -> Cadence:
        """The parsed `every`."""
        return Cadence.parse(self.every, f"evaluator.{self.kind}.every")

    def __post_init__(self) -> None:
        _ = self.cadence  # raises ConfigError
        key = f"evaluator.{self.kind}"
        require(
            self.held_out or bool(self.sets),
            f"{key}.held_out=false leaves nothing to evaluate: add a set with +data@{key}.sets.NAME=OPTION",
        )
        for name, data in self.sets.items():
            check_metric_part(f"{key}.sets.{name}", name)
            check_set(f"{key}.sets.{name}", data, self.learns)

    def check_files(self) -> None:
        """Raises ConfigError for a file of an option that cannot be read."""

    def check(self, data: Dataset) -> None:
        """Raises ConfigError or DataError if the data does not fit this evaluator. Called before training starts."""

    def evaluate(self, embedder: Embedder, data: Dataset) -> Metrics:
        """Returns {metric: value}, the same on every rank and for any number of ranks. Collective."""
        raise NotImplementedError
