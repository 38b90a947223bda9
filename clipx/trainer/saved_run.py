"""Loads the configuration and the checkpoints of a finished or running run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.config.safe_yaml import read_saved
from clipx.config.saved import from_dict
from clipx.errors import CheckpointError
from clipx.trainer.spec import RunSpec

if TYPE_CHECKING:
    from clipx.checkpoint.format import Checkpoint


class Weights(StrEnum):
    auto = "auto"  # the moving average where the run kept one, as it evaluates itself
    trained = "trained"
    average = "average"


_CONFIG = "config.yaml"  # in a run directory


def load_run(run_dir: Path) -> RunSpec:
    """The configuration that a run directory was trained with. Raises CheckpointError where it holds none."""
    path = run_dir / _CONFIG
    if not path.is_file():
        raise CheckpointError(f"run={run_dir} holds no run (no config.yaml): check the path")
    return from_dict(RunSpec, read_saved(path))


def part_of(found: Checkpoint, chosen: Weights, run: str) -> str:
    """The part of a run's checkpoint that the weights are in. Raises CheckpointError where that has none such."""
    averaged = any(name.startswith("average/") for name in found.tensors)
    if chosen is Weights.average and not averaged:
        raise CheckpointError(f"weights=average: run={run} kept none (optimizer.ema_decay=null): choose trained")
    return "average" if averaged and chosen is not Weights.trained else "model"
