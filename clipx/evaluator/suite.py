"""All evaluators of a run and the data of each: the run's own, and sets besides. Opened and checked before training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from clipx.config.saved import to_dict
from clipx.data.bad_samples import check_bad_share
from clipx.data.source import Source
from clipx.data.spec import Dataset, DataSpec, open_on_all_ranks
from clipx.distributed.comm import Comm
from clipx.errors import ClipxError, ConfigError, DataError, with_location
from clipx.evaluator.base import Embedder, Metrics
from clipx.evaluator.spec import EvaluatorSpec


@dataclass(frozen=True, slots=True)
class Task:
    """Data that an evaluator is given: of the set `name`, or where that is None the run's own."""

    evaluator: str
    name: str | None
    data: DataSpec
    dataset: Dataset

    @property
    def prefix(self) -> str:
        """Of its metrics."""
        return f"eval/{self.evaluator}/" + ("" if self.name is None else f"{self.name}/")

    @property
    def label(self) -> str:
        return self.data.name if self.name is None else self.name

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Errors say which set they are of."""
        try:
            yield
        except ClipxError as error:
            raise _at(error, self.evaluator, self.name, self.data) from None


@dataclass(frozen=True, slots=True)
class Suite:
    """The evaluators by name, and what each is given: its own data first, then its sets as they were named."""

    evaluators: Mapping[str, EvaluatorSpec]
    tasks: Sequence[Task]

    @classmethod
    def open(
        cls, evaluators: Mapping[str, EvaluatorSpec], data: DataSpec | None, own: Dataset | None, comm: Comm
    ) -> Suite:
        """Opens the sets, each once, and checks that each evaluator has what it needs.

        `data` is what is evaluated besides the sets, where there is something; `own` where it is the run's own, and the
        run has opened it. Collective. Raises ConfigError and DataError.
        """
        if own is not None and (wanting := [name for name, e in evaluators.items() if e.held_out]):
            _check_held_out(wanting, own)
        opened: dict[str, Dataset] = {}
        tasks = []
        for name, evaluator in evaluators.items():
            given: dict[str | None, DataSpec] = {None: data} if data is not None and evaluator.held_out else {}
            for key, spec in (given | evaluator.sets).items():
                if key is None and own is not None:
                    tasks.append(Task(name, None, spec, own))
                else:
                    tasks.append(Task(name, key, spec, _open(name, key, spec, evaluator.learns, comm, opened)))
            if not any(task.evaluator == name for task in tasks):
                raise ConfigError(
                    f"evaluator.{name} has nothing to evaluate: give data=…, or a set by "
                    f"+data@evaluator.{name}.sets.NAME=OPTION"
                )
        suite = cls(evaluators, tasks)
        suite._check()
        comm.require_equal(
            sets={task.prefix: task.dataset.held_out.fingerprint for task in tasks if task.dataset.held_out}
        )
        return suite

    def _check(self) -> None:
        for task in self.tasks:
            with task.named():
                self.evaluators[task.evaluator].check(task.dataset)
                self._check_names(task)

    def _check_names(self, task: Task) -> None:
        """A set has no name that numbers of the run's own data begin with, or that stands beside it in a table."""
        own = next((t for t in self.tasks if t.evaluator == task.evaluator and t.name is None), None)
        taken = {*self.evaluators[task.evaluator].parts, "average"}
        if own is not None:
            taken |= {own.data.name, *(own.dataset.classes.subsets if own.dataset.classes else ())}
        if task.name in taken:
            raise ConfigError(f"evaluator.{task.evaluator}.sets.{task.name} has a name that is taken: give it another")

    @property
    def sources(self) -> Sequence[Source]:
        """Of the sets, each once."""
        datasets = [task.dataset for task in self.tasks if task.name is not None]
        found = [source for dataset in datasets for source in (dataset.train, dataset.held_out) if source is not None]
        return list({id(source): source for source in found}.values())

    def compared(self) -> dict[str, dict[str, str]]:
        """{evaluator: {set: the name of the number by which sets are compared}}."""
        found: dict[str, dict[str, str]] = {}
        for task in self.tasks:
            for metric in self.evaluators[task.evaluator].compared[:1]:
                found.setdefault(task.evaluator, {})[task.label] = f"{task.prefix}{metric}"
        return found

    def evaluate(self, names: Sequence[str], embedder: Embedder) -> Metrics:
        """The numbers of these evaluators: `eval/<evaluator>/<metric>`, of sets `eval/<evaluator>/<set>/<metric>`."""
        numbers: Metrics = {}
        for task in self.tasks:
            if task.evaluator in names:
                with task.named():
                    found = self.evaluators[task.evaluator].evaluate(embedder.for_data(task.data), task.dataset)
                numbers |= {f"{task.prefix}{metric}": value for metric, value in found.items()}
        return numbers


def _check_held_out(names: Sequence[str], own: Dataset) -> None:
    if own.held_out is None:
        raise DataError(
            f"evaluator=[{','.join(names)}] needs held-out data and this data holds out none: raise "
            "data.held_out_share, name held-out data, train without with evaluator=[], or evaluate sets alone with "
            f"evaluator.{names[0]}.held_out=false"
        )


def _open(
    evaluator: str, name: str | None, data: DataSpec, learns: bool, comm: Comm, opened: dict[str, Dataset]
) -> Dataset:
    """A set; `opened` has those that were opened before, by what they are."""
    how = type(data).open if learns else type(data).open_for_evaluation
    key = json.dumps([learns, to_dict(data)])
    try:
        if key not in opened:
            opened[key] = open_on_all_ranks(data, comm, how)
        held_out = opened[key].held_out
        if held_out is None:
            raise DataError("it holds nothing out: raise data.held_out_share, or name held-out data")
        bad = held_out.bad
        check_bad_share(len(bad), sum(held_out.sizes) + len(bad), data.max_bad_share, bad[:1])
    except ClipxError as error:
        raise _at(error, evaluator, name, data) from None
    return opened[key]


def _at(error: ClipxError, evaluator: str, name: str | None, data: DataSpec) -> ClipxError:
    """An error of a set names the keys where they are, and the set."""
    if name is None:
        return error
    place = f"evaluator.{evaluator}.sets.{name}"
    there = with_location(error, place, [f.name for f in dataclasses.fields(data)])
    return there if place in str(there) else type(there)(f"{place}: {there}")
