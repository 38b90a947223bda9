"""Claiming a run directory, and the small files in it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from helpers.runs import VIT, small

from clipx.config.saved import to_dict
from clipx.errors import CheckpointError, ClipxError, ConfigError, DiskError
from clipx.objective.base import Metrics
from clipx.run.directory import RunDir
from clipx.trainer.trainer import Trainer


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


def test_a_value_that_the_start_of_the_run_finds_is_no_change(tmp_path: Path) -> None:
    """A sweep that is launched again compares the composed configuration with the saved one."""
    found = ("model.image.mean=[0.1,0.2,0.3]", "model.image.std=[0.1,0.2,0.3]")
    rundir = create_run(tmp_path, "model.image.weights=/trunk.pt", *found)

    def is_another_run(*typed: str) -> bool:
        try:
            return rundir.claim(small(tmp_path, "resume=auto", "model.image.weights=/trunk.pt", *typed)) != []
        except CheckpointError:
            return True

    assert not is_another_run() and not is_another_run(*found)
    assert is_another_run("model.image.mean=[0,0,0]")


SAVING = (*VIT, "precision=fp32", "duration=4st", "checkpoint.every=2st", "resume=auto")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a run of four steps, with checkpoints."""
    folder = tmp_path_factory.mktemp("run") / "run"
    Trainer(small(folder, *SAVING)).fit()
    return folder


def copied(run: Path, into: Path) -> Path:
    """Returns a copy of a run directory under its own name, which is saved in its configuration."""
    return Path(shutil.copytree(run, into / run.name))


def without_end(config: Path) -> None:
    config.write_bytes(config.read_bytes()[:-400])


def cut_at_a_line(config: Path) -> None:
    """Leaves YAML that can be read, with fewer keys."""
    config.write_text("".join(config.read_text().splitlines(keepends=True)[:40]))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda config: config.write_bytes(b""),
    "cut": without_end,
    "cut at a line": cut_at_a_line,
    "random": lambda config: config.write_bytes(bytes(range(256)) * 9),
    "of another kind": lambda config: config.write_text("- 1\n"),
    "missing": lambda config: config.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_configuration_is_read_from_the_newest_checkpoint(
    finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    run = RunDir(copied(finished, tmp_path))
    before = yaml.safe_load(run.config.read_text())
    spec = small(run.path, *SAVING, f"run_dir={before['run_dir']}")
    DAMAGES[damage](run.config)
    with pytest.raises(CheckpointError, match="already holds a run"):
        run.claim(small(run.path, *SAVING, "resume=none"))
    with pytest.raises(CheckpointError, match="seed: 0 -> 7"):
        run.claim(small(run.path, *SAVING, "seed=7"))
    assert run.claim(spec) == []
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "read from the checkpoint step-00000004" in warnings[0]
    run.save_config(spec)
    assert yaml.safe_load(run.config.read_text()) == before == to_dict(spec)


def test_a_checkpoint_without_a_configuration_restores_none(finished: Path, tmp_path: Path) -> None:
    """The hash of its state does not match: nothing is trained with what is left of the file."""
    run = RunDir(copied(finished, tmp_path))
    without_end(run.config)
    for state in run.checkpoints.glob("*/state.json"):
        state.write_text(state.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(CheckpointError, match="its end is missing"):
        run.claim(small(run.path, *SAVING))


NAMES = ("config.yaml", "metrics.jsonl", "events.jsonl", "quarantine.jsonl", "report.html", "report.png", "run.lock")


@pytest.mark.parametrize(
    "name",
    [*NAMES, "run.lock.guard", "stacks.rank0.txt", "predictions-captions.json", "wandb_id", "mlflow_id", "mlflow.db"],
)
def test_a_link_or_pipe_where_the_run_writes_is_named_before_it_starts(tmp_path: Path, name: str) -> None:
    run, target = RunDir(tmp_path / "run"), tmp_path / "target"
    run.path.mkdir()
    place = run.path / name
    for make in (lambda: place.symlink_to(target), lambda: os.mkfifo(place), lambda: place.mkdir()):
        make()
        with pytest.raises(CheckpointError, match=f"{name} cannot be written .it is .*: remove it"):
            run.check_files()
        (place.rmdir if place.is_dir() else place.unlink)()
    assert not target.exists()
    run.checkpoints.symlink_to(tmp_path)
    (run.path / "data").symlink_to(tmp_path)
    run.check_files()


def test_a_link_made_during_a_run_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, target = RunDir(tmp_path), tmp_path / "target"
    target.write_text("before\n")
    run.events.symlink_to(target)
    run.event("start")
    assert target.read_text() == "before\n" and "it is a link" in caplog.text
    run.config.symlink_to(target)
    run.save_config(small(tmp_path))
    assert target.read_text() == "before\n" and not run.config.is_symlink()


def train_until(run: Path, step: int, then: Callable[[], object], *overrides: str) -> None:
    """Trains, and calls `then` before the step after `step`."""
    trainer = Trainer(small(run, *VIT, "duration=8st", *overrides))
    make_step = trainer.step

    def stepping(batch: object) -> Metrics:
        if trainer.steps_done == step:
            then()
        return make_step(batch)  # type: ignore[arg-type]

    trainer.step = stepping  # type: ignore[method-assign]
    trainer.fit()


SAVED_AT_ONCE = ("report=true", "checkpoint.every=2st", "checkpoint.background=false")


@pytest.mark.parametrize("overrides", [(), ("log_every=100st", "checkpoint.every=6st"), ("log_every=8st",)], ids=str)
def test_a_run_whose_directory_is_gone_ends_with_one_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, overrides: tuple[str, ...]
) -> None:
    """It ends at the next row, checkpoint or end. Nothing is created again, and what was written can be resumed."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    with pytest.raises(ClipxError) as error:
        train_until(run, 4, lambda: run.rename(moved), *SAVED_AT_ONCE, *overrides)
    assert isinstance(error.value, DiskError)
    assert f"{run} was deleted, moved or unmounted during the run" in str(error.value)
    assert not run.exists()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 1
    moved.rename(run)
    Trainer(small(run, *VIT, "duration=8st", "resume=auto")).fit()


def test_a_run_that_is_beyond_its_end_is_refused_and_nothing_is_written(finished: Path, tmp_path: Path) -> None:
    run = RunDir(copied(finished, tmp_path))
    before = {path: path.read_bytes() for path in run.path.rglob("*.*") if path.is_file()}
    with pytest.raises(
        ConfigError, match="duration=3st ends at step 3, .*step-00000004 is of step 4: give duration=4st"
    ):
        Trainer(small(run.path, *SAVING, "duration=3st"))
    assert {path: path.read_bytes() for path in run.path.rglob("*.*") if path.is_file()} == before
    assert Trainer(small(run.path, *SAVING)).fit()["step"] == 4
