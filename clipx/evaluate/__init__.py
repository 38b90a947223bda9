"""`python -m clipx.evaluate run=outputs/…`: evaluates checkpoints of runs, or other weights, by any evaluators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from clipx.checkpoint.resume import CHECKPOINTS
from clipx.cli import cli, imports
from clipx.command_spec import UNUSED_WITH_EVALUATOR, DataCommandSpec
from clipx.config.names import name_of
from clipx.config.registry import frozen, option, register
from clipx.errors import CheckpointError, require, require_effect
from clipx.evaluator.spec import check_data, check_set
from clipx.storage.files import is_local, local_path
from clipx.trainer.saved_run import SavedRun, check_no_changes, check_only_of_runs, find_runs, holds_run
from clipx.weights.spec import ALL_STEPS, WeightsChoice


@register("")
@frozen
class EvaluateSpec(DataCommandSpec):
    """Options of clipx.evaluate. A group that is not given is that of the run, with the keys that are given.

    `run` is also one of its checkpoints, a folder of run directories, or a folder of weight files.
    """

    kind: str = "evaluate"
    """Name of this command's options. The key itself cannot be set."""

    step: str | None = option(None, choices=(ALL_STEPS,), ge=0, hint="give the number of a checkpoint, or all")
    """Checkpoint of the run, by its number of steps, or `all`. null: the newest one. Only for runs."""

    weights: WeightsChoice = WeightsChoice.auto
    """Weights of the checkpoint: `auto` (the moving average if the run has one, as in the run's evaluations), `trained`
    or `average` (the moving average). Only for runs."""

    out: str | None = None
    """Output folder for the JSON file and the plot. null: the run directory or the folder of the runs, and
    outputs/evaluations/NAME for a URL and for other weights."""

    changes: list[str] = field(default_factory=list)
    """Overrides of the configurations of the runs. The command line sets it: give the keys themselves."""

    def __post_init__(self) -> None:
        DataCommandSpec.__post_init__(self)
        if self.data is not None:
            check_set("data", self.data, any(e.learns for e in self.evaluator.values()))
            held_out = not self.evaluator or any(e.held_out for e in self.evaluator.values())
            require_effect(held_out, f"data={self.data.kind}", "with held_out=false of all evaluators", "remove one")


def evaluate(spec: EvaluateSpec) -> None:
    """Evaluates models, prints tables, and writes JSON and, for several results, a plot. Collective."""
    runs, steps = runs_and_steps(spec)  # before torch is loaded, so that a mistyped path fails immediately
    check_data(spec.data, spec.evaluator, files=spec.distributed.check_launch().world == 1)
    with imports():
        from clipx.distributed.launch_env import warn_of_few_cores
        from clipx.evaluate.candidates import evaluate_runs, evaluate_weights
        from clipx.evaluator.results import report_results
        from clipx.report.console import Screen

    with spec.distributed.joined() as comm:
        screen = Screen(comm.is_main)
        if spec.data is not None:
            warn_of_few_cores("data.workers", spec.data.loader_processes(comm.sharing), comm.rank)
        found = []
        for suite, one in evaluate_runs(spec, runs, steps, comm) if runs else evaluate_weights(spec, comm):
            found.append((suite, one))
            screen.print(f"evaluated {one.label}")
        if not found:
            raise CheckpointError(f"run={spec.run} has no checkpoint yet: train it first")
        if comm.is_main:
            folder = runs[0].folder if len(runs) == 1 else Path(local_path(spec.run))
            if not (runs and is_local(spec.run)):
                folder = Path("outputs/evaluations") / name_of(runs[0].location if len(runs) == 1 else spec.run)
            several = len(found) > 1 or steps == ALL_STEPS
            suite, models = found[0][0], [one for _, one in found]
            report_results(Path(spec.out) if spec.out else folder, models, suite, several, screen)


def runs_and_steps(spec: EvaluateSpec) -> tuple[list[SavedRun], str | None]:
    """Returns the runs at `spec.run`, empty if it is not a run, and the steps to evaluate.

    Raises ConfigError for options without effect, CheckpointError if nothing is there.
    """
    location, steps = spec.run, spec.step
    parent, _, name = location.rstrip("/").rpartition("/")
    if name == CHECKPOINTS and holds_run(parent or "."):
        location, steps = parent or ".", steps or ALL_STEPS
    runs = find_runs(location, spec.changes)
    if runs and runs[0].step is not None:
        steps = str(runs[0].the_step(steps))
    _check_effect(spec, runs)
    return runs, steps


def _check_effect(spec: EvaluateSpec, runs: Sequence[SavedRun]) -> None:
    if runs:
        spec.check_unused(f"run={spec.run}")
        return
    check_only_of_runs(spec.run, step=spec.step, weights=spec.weights)
    check_no_changes(spec.run, spec.changes)
    require(
        bool(spec.evaluator),
        f"run={spec.run} is not a run and has no evaluators and data: give evaluator=[…], and data=… or data sets by "
        "+data@evaluator.EVALUATOR.sets.NAME=OPTION",
    )


main = cli(
    evaluate,
    "evaluate",
    unused=UNUSED_WITH_EVALUATOR,
    of_run=("precision", "data", "evaluator"),
    check=runs_and_steps,
)
