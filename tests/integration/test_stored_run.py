"""A run saved by commit 8ddb223, with the option and module names of that time, resumes: each tensor bit for bit, and its last step to 1e-9.

`stored_run/` contains its options, data, configuration and two of its checkpoints: of step 3, and of its last step 6.
FastCLIP v2 in float64, with per-sample temperatures, a moving average, patch dropout and two micro-batches.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers.runs import compose, tensors

from clipx.trainer.trainer import Trainer

STORED = Path(__file__).parent / "stored_run"
# Defaults of that time that have changed since.
GAMMA = ["objective.gamma.schedule=cosine", "objective.gamma.minimum=0.2", "objective.gamma.decay=50%"]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns options that resume a copy of the run from step 3. Its paths are relative to the working directory."""
    for name in ("train.tar", "held_out.tar", "tokenizer.json"):
        shutil.copy(STORED / name, tmp_path)
    shutil.copytree(STORED / "checkpoints" / "step-00000003", tmp_path / "run" / "checkpoints" / "step-00000003")
    for name in ("config.yaml", "metrics.jsonl", "events.jsonl"):
        shutil.copy(STORED / name, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    typed = (STORED / "options.txt").read_text().split()
    return [*typed, *GAMMA, "compile.towers=false", "name=stored", "run_dir=run", "resume=step:3"]


def test_every_tensor_and_the_position_are_restored(options: list[str]) -> None:
    trainer = Trainer(compose(*options))
    assert (trainer.samples_seen, trainer.steps_done) == (48, 3)
    assert "resumed" in trainer.run.facts and "changed" not in trainer.run.facts
    restored = trainer.learner.state.capture()
    expected = tensors(STORED, 3)
    assert restored.keys() == expected.keys()
    for name, value in restored.items():
        found = value if isinstance(value, torch.Tensor) else value.tensor
        torch.testing.assert_close(found, expected[name], rtol=0, atol=0, equal_nan=True, msg=name)
    trainer.close()


def test_the_resumed_run_ends_like_the_saved_run(options: list[str]) -> None:
    """Compares to 1e-9: since that commit the text tower computes texts in order of their lengths, which changes the order
    of sums."""
    Trainer(compose(*options)).fit()
    ended, expected = tensors(Path("run"), 6), tensors(STORED, 6)
    assert ended.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ended[name], value, rtol=1e-9, atol=1e-9, equal_nan=True, msg=name)
