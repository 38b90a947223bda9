"""Loads the configuration of a finished or running run."""

from __future__ import annotations

from pathlib import Path

from clipx.config.safe_yaml import read_saved
from clipx.config.saved import from_dict
from clipx.errors import CheckpointError
from clipx.run.directory import RunDir
from clipx.trainer.spec import RunSpec


def load_run(run_dir: Path) -> RunSpec:
    """Returns the configuration that a run directory was trained with. Raises CheckpointError if there is none."""
    path = RunDir(run_dir).config
    if not path.is_file():
        raise CheckpointError(f"run={run_dir} holds no run (no config.yaml): check the path")
    return from_dict(RunSpec, read_saved(path))
