"""`python -m clipx.evaluate run=outputs/…`: evaluates checkpoints of runs, or anyone's weights, by any evaluators."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clipx.checkpoint.resume import CHECKPOINTS, is_checkpoint, step_of
from clipx.cli import cli
from clipx.config.registry import MISSING, option
from clipx.data.spec import DataSpec
from clipx.distributed.spec import DistributedSpec
from clipx.errors import CheckpointError, require
from clipx.evaluator.spec import EvaluatorSpec, check_set
from clipx.precision.spec import PrecisionSpec
from clipx.run.directory import RunDir
from clipx.trainer.saved_run import load_run
from clipx.trainer.spec import RunSpec
from clipx.weights.spec import ALL_STEPS, WeightsChoice


@option("")
@dataclass(kw_only=True, slots=True)
class EvaluateSpec:
    """What to evaluate. Where a group is left out, the run's own is taken."""

    kind: str = "evaluate"
    run: str = (
        MISSING  # a run directory, a folder of them, or weights as model.weights takes them, or a folder of files
    )
    step: str | None = None  # of the checkpoint of a run; all: of each; null: the newest
    weights: WeightsChoice = WeightsChoice.auto  # of a run
    out: str | None = None  # a folder for the JSON and the picture; null: the run's, or that of the runs; of others
    # outputs/evaluations/NAME
    precision: PrecisionSpec | None = None  # null: the run's; of other weights fp32
    data: DataSpec | None = None
    distributed: DistributedSpec = MISSING
    evaluator: dict[str, EvaluatorSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            self.step is None or self.step == ALL_STEPS or self.step.isdecimal(),
            f"step={self.step} is no step: give the number of a checkpoint, or all",
        )
        if self.data is not None:
            check_set("data", self.data, any(e.learns for e in self.evaluator.values()))
            require(
                not self.evaluator or any(e.held_out for e in self.evaluator.values()),
                f"data={self.data.kind} has no effect on evaluators of their sets alone: leave out held_out=false",
            )


def evaluate(spec: EvaluateSpec) -> None:
    """Prints tables; writes JSON, and a plot where there is something to compare. Collective."""
    runs, steps = find_runs(spec)  # before torch is loaded: a mistyped path is answered at once
    from clipx.evaluator.results import report_results
    from clipx.report.console import Screen
    from clipx.weights.candidates import evaluate_runs, evaluate_weights, model_name

    comm = spec.distributed.build()
    screen = Screen(comm.is_main)
    try:
        found = []
        for suite, one in evaluate_runs(spec, runs, steps, comm) if runs else evaluate_weights(spec, comm):
            found.append((suite, one))
            screen.print(f"evaluated {one.label}")
        if not found:
            raise CheckpointError(f"run={spec.run} has no checkpoint yet: train it first")
        if comm.is_main:
            folder = next(iter(runs)) if len(runs) == 1 else Path(spec.run)
            if not runs:
                folder = Path("outputs/evaluations") / model_name(spec.run)
            several = len(found) > 1 or steps == ALL_STEPS
            suite, models = found[0][0], [one for _, one in found]
            report_results(Path(spec.out) if spec.out else folder, models, suite, several, screen)
    finally:
        comm.close()


def find_runs(spec: EvaluateSpec) -> tuple[dict[Path, RunSpec], str | None]:
    """The runs at `spec.run` by their directories, none where it is not a run; and which steps of them.

    Raises ConfigError for what has no effect there, CheckpointError where there is nothing.
    """
    path, steps = Path(spec.run), spec.step
    if is_checkpoint(path.name) and path.parent.name == CHECKPOINTS:
        require(steps is None, f"step={steps} has no effect on run={path}, which is one: leave it out")
        path, steps = path.parent.parent, str(step_of(path))
    elif path.name == CHECKPOINTS and RunDir(path.parent).config.is_file():
        path, steps = path.parent, steps or ALL_STEPS
    local = re.match(r"[\w-]+:", spec.run) is None
    if RunDir(path).config.is_file() or (local and not path.exists()):
        runs = {path: load_run(path)}
    else:
        runs = {folder: load_run(folder) for folder in sorted(path.glob("*")) if RunDir(folder).config.is_file()}
    _check_effect(spec, runs)
    return runs, steps


def _check_effect(spec: EvaluateSpec, runs: Mapping[Path, RunSpec]) -> None:
    if runs:
        return
    for key, value, default in (("step", spec.step, None), ("weights", spec.weights, WeightsChoice.auto)):
        require(value == default, f"{key}={value} has no effect on run={spec.run}, which is no run: leave it out")
    require(
        bool(spec.evaluator),
        f"run={spec.run} is no run, whose evaluators and data would be taken: give evaluator=[…], and data=… or sets "
        "by +data@evaluator.EVALUATOR.sets.NAME=OPTION",
    )


main = cli(evaluate, "evaluate")

if __name__ == "__main__":
    main()
