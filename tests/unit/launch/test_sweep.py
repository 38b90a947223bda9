"""Sweeps before they start: their points are composed and checked, and nothing else is written."""

from __future__ import annotations

from pathlib import Path

from helpers.slurm_jobs import QUICK, SLURM, launch


def test_a_large_sweep_shows_its_progress_on_stderr(tmp_path: Path) -> None:
    printed = launch(*SLURM, "hydra.launcher.submit=false", f"hydra.sweep.dir={tmp_path}/s", *QUICK, "seed=range(20)")
    assert printed.stderr == "checking: 20 points\nwriting: 20 points\n"
    assert printed.stdout.startswith("#!/bin/bash\n")
    assert len(list(tmp_path.glob("s/*/.launch/config.yaml"))) == 20
