"""Stretching of text positions to a longer context: Long-CLIP's formula, and a run."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.runs import VIT, small

from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_into, load_with_spec
from clipx.weights.positions import stretched

NAME = "text.positional_embedding"


def long_clip(before: torch.Tensor, keep: int) -> torch.Tensor:
    """The loops of Long-CLIP's published code (arXiv:2403.15378), which stretch by a factor of 4."""
    length, width = before.shape
    after = torch.zeros(4 * length - 3 * keep, width, dtype=before.dtype)
    after[:keep] = before[:keep]
    for i in range(length - 1 - keep):
        here, following = before[i + keep], before[i + 1 + keep]
        for quarter in range(4):
            after[4 * i + keep + quarter] = ((4 - quarter) * here + quarter * following) / 4
    step = before[length - 1] - before[length - 2]
    for quarter in range(4):
        after[4 * length - 3 * keep - 4 + quarter] = before[length - 1] + quarter * step / 4
    return after


def test_77_positions_become_248_as_in_long_clip() -> None:
    before = torch.randn(77, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = stretched(before, keep=20, length=248)
    assert torch.equal(found[:20], before[:20])
    assert torch.equal(found[20::4], before[20:])
    torch.testing.assert_close(found, long_clip(before, 20), rtol=0, atol=1e-12)


def test_any_ratio_interpolates_a_line_exactly() -> None:
    """Positions on a line stay on it, beyond the last one too."""
    before = torch.arange(10.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, -2.0], dtype=torch.float64)
    for keep, length in ((0, 23), (3, 11), (8, 64)):
        place = torch.arange(length - keep, dtype=torch.float64) * (10 - keep) / (length - keep) + keep
        expected = torch.cat([torch.arange(keep), place])[:, None] * before[1]
        torch.testing.assert_close(stretched(before, keep, length), expected, rtol=0, atol=1e-12)


def test_a_run_starts_from_shorter_weights(tmp_path: Path) -> None:
    common = (*VIT, "model.text.layers=1", "duration=1st", "schedule.warmup=1st")
    Trainer(small(tmp_path / "short", *common, "model.text.context_length=12")).fit()
    longer = ("model.text.context_length=40", "model.text.stretch_keep=5", f"model.weights={tmp_path}/short")
    trainer = Trainer(small(tmp_path / "long", *common, *longer))
    before = load_with_spec(str(tmp_path / "short"), "run")[0].model[NAME]
    assert torch.equal(trainer.learner.weights.state_dict()[NAME], stretched(before, 5, 40))
    assert f"{NAME} was stretched from 12 to 40 positions, the first 5 unchanged" in trainer.run.facts["weights"].split(
        "; "
    )
    trainer.fit()
    weights, spec = load_with_spec(str(tmp_path / "long"), "run")
    assert load_into(spec.build(torch.device("cpu"), torch.float32), weights) == [], "stretched again"
