"""Claiming a run directory, and the small files in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers.runs import small

from clipx.errors import CheckpointError
from clipx.run.directory import RunDir


def claim_and_save(rundir: RunDir, *overrides: str) -> list[str]:
    spec = small(rundir.path, *overrides)
    changed = rundir.claim(spec)
    rundir.save_config(spec)
    return changed


def create_run(path: Path, *overrides: str) -> RunDir:
    """Returns a directory whose run has logged a line."""
    rundir = RunDir(path)
    assert claim_and_save(rundir, "resume=none", *overrides) == []
    rundir.metrics.write_text('{"step": 1}\n')
    return rundir


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    rundir = create_run(tmp_path / "deep" / "run")
    assert "batch_size: 32" in rundir.config.read_text()
    with pytest.raises(CheckpointError, match="already holds a run"):
        rundir.claim(small(rundir.path))


def test_resuming_as_another_run_is_rejected(tmp_path: Path) -> None:
    rundir = create_run(tmp_path)
    before = rundir.config.read_text()
    for override, line in (
        ("seed=7", "seed: 0 -> 7"),
        ("model.text.layers=1", "model.text.layers: 2 -> 1"),
        ("objective.init_temperature=0.05", "objective.init_temperature: 0.07 -> 0.05"),
        ("data.samples=512", "data.samples: 256 -> 512"),
        ("optimizer=sgd", "optimizer.kind: adamw -> sgd"),
    ):
        with pytest.raises(CheckpointError, match="belongs to another run") as error:
            claim_and_save(rundir, "resume=auto", override)
        assert line in str(error.value)
        assert rundir.config.read_text() == before


def test_a_removed_option_of_a_saved_run_is_rejected_where_it_had_an_effect(tmp_path: Path) -> None:
    rundir = create_run(tmp_path, "objective=isogclr")
    saved = yaml.safe_load(rundir.config.read_text())
    saved["objective"]["tau_gradient"] = "exact"
    rundir.config.write_text(yaml.safe_dump(saved))
    assert rundir.claim(small(tmp_path, "resume=auto", "objective=isogclr")) == []
    saved["objective"]["tau_gradient"] = "official"
    rundir.config.write_text(yaml.safe_dump(saved))
    with pytest.raises(CheckpointError, match=r"another run \(objective.tau_gradient: official -> None\)"):
        rundir.claim(small(tmp_path, "resume=auto", "objective=isogclr"))


def test_changes_of_the_training_are_reported_and_others_are_not(tmp_path: Path) -> None:
    without_effect = (
        *("log_every=2st", "logger=[tensorboard]", "checkpoint.every=3st", "checkpoint.keep_last=7"),
        *("distributed.timeout_s=60", "distributed.watchdog_s=90", "data.workers=1", "data.prefetch=3"),
    )
    lines = {
        "optimizer.lr=0.1": "optimizer.lr: 0.001 -> 0.1",
        "optimizer.weight_decay=0.3": "optimizer.weight_decay: 0.2 -> 0.3",
        "duration=8st": "duration: 4st -> 8st",
        "schedule.warmup=1st": "schedule.warmup: 2st -> 1st",
        "deterministic=true": "deterministic: False -> True",
        "precision=amp_bf16": "precision.kind: auto -> amp_bf16",
        "data.micro_batches=2": "data.micro_batches: 1 -> 2",
        "objective.products=split_fp16": "objective.products: auto -> split_fp16",
        "distributed.device=cpu": "distributed.device: auto -> cpu",
    }
    changed = claim_and_save(create_run(tmp_path), "resume=auto", *without_effect, *lines)
    assert sorted(changed) == sorted(lines.values())
