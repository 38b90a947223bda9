"""`python -m clipx.evaluate run=outputs/…`: evaluates a checkpoint of a run, by its own evaluators or others."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from clipx.cli import cli
from clipx.config import MISSING, from_dict, option
from clipx.data import DataSpec, open_on_all
from clipx.distributed import DistributedSpec
from clipx.errors import CheckpointError
from clipx.evaluator import EvaluatorSpec
from clipx.saved import read_saved
from clipx.spec import RunSpec


class Weights(StrEnum):
    auto = "auto"  # the moving average where the run kept one, as it evaluates itself
    trained = "trained"
    average = "average"


@option("")
@dataclass(kw_only=True, slots=True)
class EvaluateSpec:
    """What to evaluate. Where a group is left out, the run's own is taken."""

    kind: str = "evaluate"
    run: str = MISSING  # a run directory
    step: int | None = None  # of the checkpoint; null: the newest
    weights: Weights = Weights.auto
    data: DataSpec | None = None
    distributed: DistributedSpec = MISSING
    evaluator: dict[str, EvaluatorSpec] = field(default_factory=dict)


def load_run(run_dir: Path) -> RunSpec:
    """The configuration that a run directory was trained with. Raises CheckpointError where it holds none."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"run={run_dir} holds no run (no config.yaml): check the path")
    return from_dict(RunSpec, read_saved(path))


def evaluate(spec: EvaluateSpec) -> None:
    run = load_run(Path(spec.run))  # before torch is loaded: a mistyped path is answered at once
    from clipx.checkpoint.folder import CheckpointDir
    from clipx.checkpoint.state import load_module, part
    from clipx.console import Screen
    from clipx.evaluator.base import Embedder, check_evaluators
    from clipx.evaluator.base import evaluate as run_evaluators
    from clipx.model.blocks import named_blocks
    from clipx.rundir import RunDir

    rundir = RunDir(Path(spec.run))
    data = spec.data or run.data
    evaluators = spec.evaluator or run.evaluator
    comm = spec.distributed.build()
    try:
        dataset = open_on_all(data, comm)
        check_evaluators(evaluators, dataset)
        found = CheckpointDir(rundir.checkpoints, print).load_on_all(comm, spec.step)
        if found is None:
            raise CheckpointError(f"run={spec.run} has no checkpoint yet: train it first")
        precision = run.precision.build(comm.device)
        model = run.model.build(comm.device, precision.dtype)
        run.precision.convert(named_blocks(model))
        averaged = part("average", found.tensors)
        if spec.weights is Weights.average and not averaged:
            raise CheckpointError(
                f"weights=average: run={spec.run} kept none (optimizer.ema_decay=null): choose trained"
            )
        if averaged and spec.weights is not Weights.trained:
            load_module(model, averaged, "average")
        else:
            load_module(model, part("model", found.tensors), "model")
        embedder = Embedder.build(model, run.model, data, comm, precision, rundir.quarantine)
        numbers = run_evaluators(evaluators, embedder, dataset)
        if comm.is_main:
            path = rundir.path / f"evaluation-{data.name}-step-{found.step}.json"
            path.write_text(json.dumps({"step": found.step, "data": data.name, **numbers}, indent=1) + "\n")
            screen = Screen(True)
            screen.table(f"{run.name}, step {found.step}, on {data.name}", numbers)
            screen.say(f"written to {path}")
    finally:
        comm.close()


main = cli(evaluate, "evaluate")

if __name__ == "__main__":
    main()
