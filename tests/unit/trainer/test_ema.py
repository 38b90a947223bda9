"""The moving average of the weights: its definition, checkpoints, resuming, and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from helpers.runs import VIT, compose, small

from clipx.evaluate import EvaluateSpec, evaluate
from clipx.trainer.trainer import Trainer

DECAY = 0.9
EMA = (*VIT, f"optimizer.ema_decay={DECAY}", "checkpoint.every=2st", "duration=4st", "checkpoint.keep_last=9")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("average") / "run"


@pytest.fixture(scope="module")
def trained(run_dir: Path) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """Returns a trained run, and its average computed by the definition."""
    trainer = Trainer(small(run_dir, *EMA))
    expected: dict[str, torch.Tensor] = {}
    step = trainer.step

    def watched(batch):
        metrics = step(batch)
        for name, value in trainer.learner.model.named_parameters():
            now = value.detach().double()
            expected[name] = DECAY * expected[name] + (1 - DECAY) * now if name in expected else now
        return metrics

    trainer.step = watched  # type: ignore[method-assign]
    trainer.fit()
    return trainer, expected


def test_ema_matches_its_definition(trained: tuple[Trainer, dict[str, torch.Tensor]]) -> None:
    trainer, expected = trained
    assert trainer.learner.average is not None
    found = dict(trainer.learner.average.model.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(found[name], p) for name, p in trainer.learner.model.named_parameters())


def test_ema_resumes_bit_for_bit(run_dir: Path, trained: tuple[Trainer, object]) -> None:
    trainer, _ = trained
    assert trainer.learner.average is not None
    uninterrupted = {name: value.clone() for name, value in trainer.learner.average.state().items()}
    again = Trainer(small(run_dir, *EMA, "resume=step:2"))
    again.fit()
    assert again.learner.average is not None
    assert all(torch.equal(uninterrupted[name], value) for name, value in again.learner.average.state().items())


def test_ema_is_evaluated(tmp_path: Path) -> None:
    """An average with a decay near 1 equals the weights of the first step, independent of later steps."""
    overrides = ("evaluator=[retrieval]", "optimizer.lr=0.01")
    one = Trainer(small(tmp_path / "one", *overrides, "duration=1st", "schedule.warmup=1st")).fit()
    slow = (*overrides, "optimizer.ema_decay=0.9999999", "duration=3st", "schedule=constant", "schedule.warmup=1st")
    averaged = Trainer(small(tmp_path / "averaged", *slow)).fit()
    numbers = {name for name in one if name.startswith("eval/")}
    assert numbers
    assert {name: averaged[name] for name in numbers} == pytest.approx({name: one[name] for name in numbers}, abs=0.05)


def test_a_checkpoint_is_evaluated_with_or_without_ema(run_dir: Path, trained: object) -> None:
    found = {}
    for weights in ("auto", "average", "trained"):
        spec = compose(f"run={run_dir}", "evaluator=[retrieval]", f"weights={weights}", config_name="evaluate")
        evaluate(cast("EvaluateSpec", spec))
        (path,) = run_dir.glob("evaluation-*-step-4.json")
        found[weights] = path.read_text()
    assert found["auto"] == found["average"] != found["trained"]
