"""`python -m clipx.evaluate run=outputs/…`: evaluates checkpoints of runs, or anyone's weights, by any evaluators."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.checkpoint.resume import CHECKPOINTS, is_checkpoint, step_of
from clipx.cli import cli
from clipx.config.registry import MISSING, option
from clipx.config.saved import option_from_dict, to_dict
from clipx.data.spec import DataSpec, open_on_all_ranks
from clipx.distributed.spec import DistributedSpec
from clipx.errors import CheckpointError, require
from clipx.evaluator.spec import EvaluatorSpec, check_set
from clipx.model.spec import ModelSpec
from clipx.precision.spec import PrecisionSpec
from clipx.run.load import _CONFIG, Weights, load_run, part_of
from clipx.trainer.spec import RunSpec

if TYPE_CHECKING:
    from clipx.checkpoint.format import Checkpoint
    from clipx.data.source import BadRecord
    from clipx.distributed.comm import Comm
    from clipx.evaluator.suite import Suite
    from clipx.evaluator.tables import Evaluated
    from clipx.model.clip import CLIP
    from clipx.report.console import Screen
    from clipx.weights.load import Weights as Found


ALL = "all"  # as a step: each checkpoint
_NAMED = 10  # bad samples
_MODELS = ("open_clip_config.json", "config.json")  # a folder with one of these is a model, whatever else is in it


@option("")
@dataclass(kw_only=True, slots=True)
class EvaluateSpec:
    """What to evaluate. Where a group is left out, the run's own is taken."""

    kind: str = "evaluate"
    run: str = (
        MISSING  # a run directory, a folder of them, or weights as model.weights takes them, or a folder of files
    )
    step: str | None = None  # of the checkpoint of a run; all: of each; null: the newest
    weights: Weights = Weights.auto  # of a run
    out: str | None = None  # a folder for the JSON and the picture; null: the run's, or that of the runs; of others
    # outputs/evaluations/NAME
    precision: PrecisionSpec | None = None  # null: the run's; of other weights fp32
    data: DataSpec | None = None
    distributed: DistributedSpec = MISSING
    evaluator: dict[str, EvaluatorSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            self.step is None or self.step == ALL or self.step.isdecimal(),
            f"step={self.step} is no step: give the number of a checkpoint, or all",
        )
        if self.data is not None:
            check_set("data", self.data, any(e.learns for e in self.evaluator.values()))
            require(
                not self.evaluator or any(e.held_out for e in self.evaluator.values()),
                f"data={self.data.kind} has no effect on evaluators of their sets alone: leave out held_out=false",
            )


def evaluate(spec: EvaluateSpec) -> None:
    """Collective. Prints tables; writes JSON, and a picture where there is something to compare."""
    runs, steps = find_runs(spec)  # before torch is loaded: a mistyped path is answered at once
    from clipx.evaluator.tables import Evaluated
    from clipx.report.console import Screen

    comm = spec.distributed.build()
    screen = Screen(comm.is_main)
    try:
        found: list[tuple[Suite, Evaluated]] = []
        candidates = _of_runs(spec, runs, steps, comm) if runs else _of_weights(spec, comm)
        for candidate in candidates:
            found.append((candidate.suite, Evaluated(candidate.name, candidate.step, candidate.evaluate(comm))))
            screen.print(f"evaluated {found[-1][1].label}")
        if not found:
            raise CheckpointError(f"run={spec.run} has no checkpoint yet: train it first")
        if comm.is_main:
            _tell(spec, runs, steps, found, screen)
    finally:
        comm.close()


# ------------------------------------------------------------------------------------------- what is at the place


def find_runs(spec: EvaluateSpec) -> tuple[dict[Path, RunSpec], str | None]:
    """The runs at `spec.run` by their directories, none where it is no run's; and which steps of them.

    Raises ConfigError for what has no effect there, CheckpointError where there is nothing.
    """
    place, steps = Path(spec.run), spec.step
    if is_checkpoint(place.name) and place.parent.name == CHECKPOINTS:
        require(steps is None, f"step={steps} has no effect on run={place}, which is one: leave it out")
        place, steps = place.parent.parent, str(step_of(place))
    elif place.name == CHECKPOINTS and (place.parent / _CONFIG).is_file():
        place, steps = place.parent, steps or ALL
    local = re.match(r"[\w-]+:", spec.run) is None
    if (place / _CONFIG).is_file() or (local and not place.exists()):
        runs = {place: load_run(place)}
    else:
        runs = {path.parent: load_run(path.parent) for path in sorted(place.glob(f"*/{_CONFIG}"))}
    _check_effect(spec, runs)
    return runs, steps


def _check_effect(spec: EvaluateSpec, runs: Mapping[Path, RunSpec]) -> None:
    if runs:
        return
    for key, value, default in (("step", spec.step, None), ("weights", spec.weights, Weights.auto)):
        require(value == default, f"{key}={value} has no effect on run={spec.run}, which is no run: leave it out")
    require(
        bool(spec.evaluator),
        f"run={spec.run} is no run, whose evaluators and data would be taken: give evaluator=[…], and data=… or sets "
        "by +data@evaluator.EVALUATOR.sets.NAME=OPTION",
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that is evaluated. `fill` gives it its weights."""

    name: str
    step: int | None
    model: ModelSpec
    precision: PrecisionSpec
    suite: Suite
    fill: Callable[[CLIP], None]
    tell_bad: Callable[[Sequence[BadRecord]], None]

    def evaluate(self, comm: Comm) -> dict[str, float]:
        from clipx.evaluator.base import Embedder
        from clipx.model.blocks import named_blocks

        precision = self.precision.build(comm.device)
        model = self.model.build(comm.device, precision.dtype)
        self.precision.convert(named_blocks(model))
        self.fill(model)
        embedder = Embedder.build(model, self.model, self.suite.tasks[0].data, comm, precision, self.tell_bad)
        return self.suite.evaluate(list(self.suite.evaluators), embedder)


def _of_runs(spec: EvaluateSpec, runs: Mapping[Path, RunSpec], steps: str | None, comm: Comm) -> Iterator[Candidate]:
    from clipx.checkpoint.format import CheckpointDir
    from clipx.run.directory import RunDir

    suites: dict[str, Suite] = {}
    for path, run in runs.items():
        rundir = RunDir(path)
        suite = _suite(spec, run, comm, suites)
        checkpoints = CheckpointDir(rundir.checkpoints, print)
        every = sorted(step_of(folder) for folder in checkpoints.folders())
        wanted = comm.from_main(every) if steps == ALL else [None if steps is None else int(steps)]
        for step in wanted:
            found = checkpoints.load_on_all(comm, step)
            if found is not None:
                fill = partial(_fill, found, spec)
                precision = spec.precision or run.precision
                yield Candidate(run.name, found.step, run.model, precision, suite, fill, rundir.quarantine)


def _suite(spec: EvaluateSpec, run: RunSpec, comm: Comm, suites: dict[str, Suite]) -> Suite:
    """The evaluators of a run; `suites` has those that were opened before, by what they are."""
    from clipx.evaluator.suite import Suite

    evaluators = spec.evaluator or run.evaluator
    require(bool(evaluators), f"run={spec.run} has no evaluators: give evaluator=[…]")
    data = spec.data or run.data
    key = json.dumps([to_dict(data), *(to_dict(evaluator) for evaluator in evaluators.values()), *evaluators])
    if key not in suites:
        own = (
            open_on_all_ranks(run.data, comm)
            if spec.data is None and any(e.held_out for e in evaluators.values())
            else None
        )
        suites[key] = Suite.open(evaluators, None if spec.data is None and own is None else data, own, comm)
    return suites[key]


def _fill(found: Checkpoint, spec: EvaluateSpec, model: CLIP) -> None:
    from clipx.checkpoint.state import load_module, select_prefix

    chosen = part_of(found, spec.weights, spec.run)
    load_module(model, select_prefix(chosen, found.tensors), chosen)


def _of_weights(spec: EvaluateSpec, comm: Comm) -> Iterator[Candidate]:
    """Of a file or a model's folder, or of each file in a folder."""
    from clipx.evaluator.suite import Suite
    from clipx.weights.load import find, load

    suite: Suite | None = None  # opened when the first weights are found, for data takes longer
    precision: PrecisionSpec = spec.precision or option_from_dict("precision", {"kind": "fp32"})
    for place in _files(spec.run):
        weights = find(place)
        if weights.spec is None:
            raise CheckpointError(
                f"{place} came without its model's configuration, so that nothing says what to build: begin a run with "
                "it by model.weights, or evaluate a model's folder"
            )
        suite = suite or Suite.open(spec.evaluator, spec.data, None, comm)
        fill = partial(_load, load, weights)
        yield Candidate(_name(place), None, weights.spec, precision, suite, fill, _tell_bad)


def _tell_bad(bad: Sequence[BadRecord]) -> None:
    """There is no run directory, whose quarantine.jsonl would name them."""
    for item in bad[:_NAMED]:
        print(f"bad sample, left out: {item.key}: {item.reason}", file=sys.stderr)
    if len(bad) > _NAMED:
        print(f"and {len(bad) - _NAMED:,} more", file=sys.stderr)


def _load(load: Callable[[CLIP, Found], object], weights: Found, model: CLIP) -> None:
    load(model, weights)


def _files(place: str) -> list[str]:
    """The files of weights in a folder that is no model's by itself, or else the place."""
    from clipx.weights.files import SUFFIXES

    folder = Path(place)
    if not folder.is_dir() or any((folder / name).is_file() for name in _MODELS):
        return [place]
    return [str(path) for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES] or [place]


def _name(place: str) -> str:
    return re.sub(r"[^\w.-]+", "-", place.rstrip("/").rpartition("/")[2])


# ----------------------------------------------------------------------------------------------------- what is told


def _tell(
    spec: EvaluateSpec,
    runs: Mapping[Path, RunSpec],
    steps: str | None,
    found: Sequence[tuple[Suite, Evaluated]],
    screen: Screen,
) -> None:
    suite, first = found[0]
    data = "-".join(dict.fromkeys(task.label for task in suite.tasks if task.name is None)) or "sets"
    folder = Path(spec.out) if spec.out else next(iter(runs)) if len(runs) == 1 else Path(spec.run)
    if not runs and not spec.out:
        folder = Path("outputs/evaluations") / _name(spec.run)
    folder.mkdir(parents=True, exist_ok=True)
    several = len(found) > 1 or steps == ALL
    path = folder / f"evaluation-{data}{'' if several or first.step is None else f'-step-{first.step}'}.json"
    if several:
        _write(path, *_several([one for _, one in found], suite, data, screen))
    else:
        _write(path, *_single(first, suite, data, screen))
    screen.print(
        f"written to {path}" + (f" and {path.with_suffix('.png').name}" if path.with_suffix(".png").is_file() else "")
    )


def _write(path: Path, values: Mapping[str, Any], picture: bytes | None) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".png").unlink(missing_ok=True)  # of an evaluation before
    if picture is not None:
        path.with_suffix(".png").write_bytes(picture)


def _single(one: Evaluated, suite: Suite, data: str, screen: Screen) -> tuple[dict[str, Any], bytes | None]:
    """Prints tables of a model's numbers; returns them, and a picture where there are several sets."""
    from clipx.evaluator.picture import draw_sets
    from clipx.evaluator.tables import robustness, robustness_table

    screen.table(f"{one.label}, on {data}", one.numbers)
    tables = robustness(suite, one.numbers)
    for name, rows in tables.items():
        screen.console.print(robustness_table(f"{name}: {one.label}, by set", rows))
    values = {"model": one.model, "step": one.step, "data": data, **one.numbers}
    return values | ({"robustness": tables} if tables else {}), draw_sets(one.label, tables) if tables else None


def _several(
    found: Sequence[Evaluated], suite: Suite, data: str, screen: Screen
) -> tuple[dict[str, Any], bytes | None]:
    """The same of several models or steps, side by side."""
    from clipx.evaluator.picture import draw_models, draw_steps
    from clipx.evaluator.tables import comparison, robustness

    screen.console.print(comparison(f"on {data}", found))
    rows = []
    for one in found:
        tables = robustness(suite, one.numbers)
        rows.append({"model": one.model, "step": one.step, **one.numbers, **({"robustness": tables} if tables else {})})
    models = {one.model for one in found}
    if len(models) < len(found):
        picture = draw_steps(f"{' and '.join(sorted(models))}, on {data}", found)
    else:
        picture = draw_models(f"{len(found)} models, on {data}", found, suite)
    return {"data": data, "models": rows}, picture


main = cli(evaluate, "evaluate")

if __name__ == "__main__":
    main()
