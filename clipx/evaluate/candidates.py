"""Models that are evaluated: checkpoints of runs, or other weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.checkpoint.format import Checkpoint
from clipx.checkpoint.state import load_module, select_prefix
from clipx.config.names import name_of
from clipx.config.saved import to_dict
from clipx.data.source import BadRecord
from clipx.data.spec import open_on_all_ranks
from clipx.distributed.comm import Comm
from clipx.errors import require
from clipx.escape import print_stderr
from clipx.evaluator.base import Embedder
from clipx.evaluator.suite import Suite
from clipx.evaluator.tables import Evaluated
from clipx.model.clip import CLIP
from clipx.model.lora import merged
from clipx.report.console import Progress
from clipx.run.directory import RunDir
from clipx.weights.load import load_into, load_with_spec, weights_part
from clipx.weights.spec import ALL_STEPS, SUFFIXES

if TYPE_CHECKING:
    from clipx.evaluate import EvaluateSpec
    from clipx.trainer.saved_run import SavedRun
    from clipx.trainer.spec import RunSpec

_MAX_NAMED = 10  # largest number of bad samples to print
_MODELS = ("open_clip_config.json", "config.json")  # a folder with one of these files is a model


def evaluate_runs(
    spec: EvaluateSpec, runs: Sequence[SavedRun], steps: str | None, comm: Comm
) -> Iterator[tuple[Suite, Evaluated]]:
    """Evaluates checkpoints of runs. `steps`: a number, `all`, or None for the newest checkpoint. Collective."""
    suites: dict[str, Suite] = {}
    for of_run, saved in Progress(shown=comm.is_main).numbered(runs, "run"):
        run, quarantine = saved.spec, _print_bad if saved.is_remote else RunDir(saved.folder).quarantine
        suite = _suite(spec, run, comm, suites)
        wanted = comm.run_on_main(saved.steps) if steps == ALL_STEPS else [None if steps is None else int(steps)]
        for progress, step in of_run.numbered(wanted, "checkpoint"):
            checkpoint = saved.load(step, comm)
            if checkpoint is not None:
                fill = partial(_fill, checkpoint, spec, run)
                precision, data = spec.precision or run.precision.elsewhere(comm.device), suite.tasks[0].data
                embedder = Embedder.of_weights(run.model, fill, precision, data, comm, quarantine, progress)
                yield suite, Evaluated(run.name, checkpoint.step, suite.evaluate(list(suite.evaluators), embedder))


def _suite(spec: EvaluateSpec, run: RunSpec, comm: Comm, suites: dict[str, Suite]) -> Suite:
    """Returns the evaluators of a run. `suites`: cache of opened suites. Collective."""
    evaluators = spec.evaluator or run.evaluator
    require(bool(evaluators), f"run={spec.run} has no evaluators: give evaluator=[…]")
    data = spec.data or run.data
    key = json.dumps([to_dict(data), *(to_dict(evaluator) for evaluator in evaluators.values()), *evaluators])
    if key not in suites:
        of_run = (
            open_on_all_ranks(run.data, comm)
            if spec.data is None and any(e.held_out for e in evaluators.values())
            else None
        )
        suites[key] = Suite.open(evaluators, None if spec.data is None and of_run is None else data, of_run, comm)
    return suites[key]


def _fill(checkpoint: Checkpoint, spec: EvaluateSpec, run: RunSpec, model: CLIP) -> None:
    prefix = weights_part(checkpoint, spec.weights, spec.run)
    load_module(model, merged(select_prefix(prefix, checkpoint.tensors), run.model, str(checkpoint.folder)), prefix)


def evaluate_weights(spec: EvaluateSpec, comm: Comm) -> Iterator[tuple[Suite, Evaluated]]:
    """Evaluates the weights of a file or a model's folder, or of each file in a folder. Collective."""
    suite: Suite | None = None  # opened after the first weights are loaded, because data takes longer
    for progress, location in Progress(shown=comm.is_main).numbered(_locations(spec.run), "weights"):
        weights, model = load_with_spec(location, "run", spec)
        suite = suite or Suite.open(spec.evaluator, spec.data, None, comm)
        fill = partial(load_into, weights=weights)
        embedder = Embedder.of_weights(model, fill, spec.number_format, suite.tasks[0].data, comm, _print_bad, progress)
        yield suite, Evaluated(name_of(location), None, suite.evaluate(list(suite.evaluators), embedder))


def _locations(location: str) -> list[str]:
    """Returns the files of weights in a folder that is not itself a model, else the location."""
    folder = Path(location)
    if not folder.is_dir() or any((folder / name).is_file() for name in _MODELS):
        return [location]
    return [str(path) for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES] or [location]


def _print_bad(bad: Sequence[BadRecord]) -> None:
    """Prints bad samples to stderr. Weights without a run directory have no quarantine.jsonl."""
    for item in bad[:_MAX_NAMED]:
        print_stderr(f"skipped bad sample {item.key}: {item.reason}")
    if len(bad) > _MAX_NAMED:
        print_stderr(f"and {len(bad) - _MAX_NAMED:,} more")
