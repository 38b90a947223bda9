"""The options of the group debug: one batch until its loss is near zero, ten steps with everything on."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.runs import VIT, compose, events, losses, rows

from clipx.data.loader import _PartSampler
from clipx.trainer.trainer import Trainer

OVERFIT = ("debug=overfit", "data.samples=64", "data.held_out_samples=16", "data.workers=0", "log_every=5st")


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_repeats_the_same_batch_on_each_rank(world: int) -> None:
    def read(first: int, rank: int) -> list[range]:
        return [part.positions for part in _PartSampler(range(first, 96, 32), 32, rank, world, 512, repeat=True)]

    for rank in range(world):
        assert set(read(32, rank)) == set(read(0, rank)) == {range(rank * 32 // world, (rank + 1) * 32 // world)}


def test_overfit_reaches_a_loss_near_zero(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer(compose(*OVERFIT, "duration=60st", f"run_dir={run}")).fit()
    assert losses(run)[0] > 0.5 and losses(run)[-1] < 0.05
    assert [event["event"] for event in events(run)] == ["start", "end"]


def test_fast_evaluates_saves_and_logs_in_ten_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fewer = ("data.samples=256", "data.held_out_samples=48", "data.workers=0", "data.batch_size=16")
    Trainer(compose("debug=fast", *VIT, *fewer, f"run_dir={run}")).fit()
    logged = rows(run)
    assert [row["step"] for row in logged if "train/loss" in row] == list(range(1, 11))
    assert any("eval/zeroshot/top1" in row and "eval/retrieval/image_to_text/recall@1" in row for row in logged)
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-00000005", "step-00000010"]
    assert list((run / "tensorboard").iterdir()) and (run / "report.html").is_file()
