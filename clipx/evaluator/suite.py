"""All evaluators of a run with their data: the run's held-out data and further sets, checked before training."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from clipx.config.saved import to_dict
from clipx.data.bad_samples import check_opened
from clipx.data.source import Source
from clipx.data.spec import Dataset, DataSpec, open_on_all_ranks
from clipx.distributed.comm import Comm
from clipx.errors import ClipxError, ConfigError, DataError
from clipx.evaluator.base import Embedder, Metrics
from clipx.evaluator.spec import EvaluatorSpec, error_at


@dataclass(frozen=True, slots=True)
class Task:
    """Data for an evaluator: the set `name`, or the run's data if `name` is None."""

    evaluator: str
    name: str | None
    data: DataSpec
    dataset: Dataset

    @property
    def prefix(self) -> str:
        """Prefix of the metric names: eval/EVALUATOR/ or eval/EVALUATOR/SET/."""
        return f"eval/{self.evaluator}/" + ("" if self.name is None else f"{self.name}/")

    @property
    def label(self) -> str:
        """Name for tables and plots: that of the set, or of the run's data."""
        return self.data.name if self.name is None else self.name

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Adds the key of the set to errors."""
        try:
            yield
        except ClipxError as error:
            raise error_at(error, self.evaluator, self.name, self.data) from None


@dataclass(frozen=True, slots=True)
class Suite:
    """Evaluators by name, and their tasks. For each evaluator: the run's data first, then its sets in order."""

    evaluators: Mapping[str, EvaluatorSpec]
    tasks: Sequence[Task]

    @classmethod
    def open(
        cls, evaluators: Mapping[str, EvaluatorSpec], data: DataSpec | None, dataset: Dataset | None, comm: Comm
    ) -> Suite:
        """Opens each set once, and checks that the data fits the evaluators. Collective.

        Args:
            evaluators: {name: evaluator}.
            data: data to evaluate in addition to the sets, if any.
            dataset: `data` as opened by the run; None if `data` must be opened here.
            comm: communicator.

        Raises ConfigError and DataError.
        """
        if dataset is not None and (names := [name for name, e in evaluators.items() if e.held_out]):
            _check_held_out(names, dataset)
        opened: dict[str, Dataset] = {}
        tasks = []
        for name, evaluator in evaluators.items():
            given: dict[str | None, DataSpec] = {None: data} if data is not None and evaluator.held_out else {}
            for key, spec in (given | evaluator.sets).items():
                if key is None and dataset is not None:
                    tasks.append(Task(name, None, spec, dataset))
                else:
                    tasks.append(Task(name, key, spec, _open(name, key, spec, evaluator.learns, comm, opened)))
            if not any(task.evaluator == name for task in tasks):
                raise ConfigError(
                    f"evaluator.{name} has nothing to evaluate: give data=…, or a set with "
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
        """Raises ConfigError if the name of a set conflicts with other metrics, or with another row of a table."""
        run_task = next((t for t in self.tasks if t.evaluator == task.evaluator and t.name is None), None)
        taken = {*self.evaluators[task.evaluator].parts, "average"}
        if run_task is not None:
            taken |= {run_task.data.name, *(run_task.dataset.classes.subsets if run_task.dataset.classes else ())}
        if task.name in taken:
            raise ConfigError(
                f"evaluator.{task.evaluator}.sets.{task.name} has a name that is already in use: choose another name"
            )

    @property
    def sources(self) -> Sequence[Source]:
        """Sources of the sets, without repetition."""
        datasets = [task.dataset for task in self.tasks if task.name is not None]
        found = [source for dataset in datasets for source in (dataset.train, dataset.held_out) if source is not None]
        return list({id(source): source for source in found}.values())

    def compared(self) -> dict[str, dict[str, str]]:
        """Returns {evaluator: {set: name of its first compared metric}}."""
        found: dict[str, dict[str, str]] = {}
        for task in self.tasks:
            for metric in self.evaluators[task.evaluator].compared[:1]:
                found.setdefault(task.evaluator, {})[task.label] = f"{task.prefix}{metric}"
        return found

    def evaluate(self, names: Sequence[str], embedder: Embedder) -> Metrics:
        """Runs these evaluators. Collective.

        Returns:
            Metrics named `eval/<evaluator>/<metric>`, and `eval/<evaluator>/<set>/<metric>` for sets.
        """
        numbers: Metrics = {}
        for task in self.tasks:
            if task.evaluator in names:
                with task.named():
                    of_task = embedder.for_data(task.data, f"{task.evaluator} {task.label}")
                    found = self.evaluators[task.evaluator].evaluate(of_task, task.dataset)
                numbers |= {f"{task.prefix}{metric}": value for metric, value in found.items()}
        return numbers


def _check_held_out(names: Sequence[str], dataset: Dataset) -> None:
    if dataset.held_out is None:
        raise DataError(
            f"evaluator=[{','.join(names)}] needs held-out samples, and the data has none: raise data.held_out_share, "
            "give held-out data, train without evaluators with evaluator=[], or evaluate sets only with "
            f"evaluator.{names[0]}.held_out=false"
        )


def _open(
    evaluator: str, name: str | None, data: DataSpec, learns: bool, comm: Comm, opened: dict[str, Dataset]
) -> Dataset:
    """Opens a set. `opened` caches the opened sets, keyed by their configuration. Collective."""
    open_one = type(data).open if learns else type(data).open_for_evaluation
    key = json.dumps([learns, to_dict(data)])
    try:
        if key not in opened:
            opened[key] = open_on_all_ranks(data, comm, open_one)
        held_out = opened[key].held_out
        if held_out is None:
            raise DataError("no held-out samples: raise data.held_out_share, or give held-out data")
        check_opened(held_out.bad, sum(held_out.sizes), data.max_bad_share)
    except ClipxError as error:
        raise error_at(error, evaluator, name, data) from None
    return opened[key]
