"""model=weights: the model of a new run comes from the configuration of its initial weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.runs import VIT, compose, small

import clipx
from clipx.config.saved import save, to_dict
from clipx.export import export
from clipx.trainer.spec import RunSpec
from clipx.trainer.trainer import Trainer
from clipx.weights.compare import check_same


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, and its exports next to it."""
    folder = tmp_path_factory.mktemp("described")
    words = (*VIT, "model.image.size=32", "model.quick_gelu=true", "duration=1st", "schedule.warmup=0st")
    Trainer(small(folder / "run", *words)).fit()
    for form, name in (("open_clip", "open_clip"), ("hf", "hf"), ("safetensors", "file.safetensors")):
        export(compose(f"run={folder}/run", f"out={folder}/{name}", f"format={form}", config_name="export"))  # type: ignore[arg-type]
    return folder / "run"


def described(location: Path, *words: str) -> RunSpec:
    return compose("model=weights", f"model.weights={location}", *words)


@pytest.mark.slow
def test_each_kind_of_weights_gives_their_model(run: Path) -> None:
    own = described(run).model
    assert to_dict(own) == {**to_dict(compose("model=tiny", *VIT, "model.image.size=32").model), "quick_gelu": True} | {
        "weights": str(run)
    }
    for name in ("run/checkpoints/step-00000001", "open_clip", "hf", "file.safetensors"):
        found = described(run.parent / name).model
        check_same(own, found, name)
        assert (found.image.size, found.embed_dim) == (32, own.embed_dim)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_run_starts_from_them_with_changes_and_continues_without_them(run: Path, tmp_path: Path) -> None:
    words = ("model=weights", f"model.weights={run.parent}/hf", "model.image.size=48", "model.image.lock=1")
    trainer = Trainer(small(tmp_path / "run", *words, "duration=1st", "schedule.warmup=0st"))
    assert "interpolated from 2x2 positions to 3x3" in trainer.run.facts["weights"]
    trainer.fit()
    (run.parent / "hf").rename(run.parent / "moved")
    continued = clipx.compose(f"resume={tmp_path}/run").model
    (run.parent / "moved").rename(run.parent / "hf")
    assert continued == trainer.spec.model and continued.image.lock == "1"


def test_any_kind_of_model_comes_from_a_run(tmp_path: Path) -> None:
    """The options of its training are not taken."""
    saved = compose("model=coca_tiny", "objective=coca")
    trained = replace(saved.model.image, lock="2", checkpointing="tower")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    whole = replace(saved, model=replace(saved.model, image=trained, weights="elsewhere"))
    save(whole, tmp_path / "run" / "config.yaml", "")
    found = described(tmp_path / "run", "objective=coca").model
    assert found == replace(saved.model, weights=f"{tmp_path}/run")
