"""Tests of the options. Run them after `pip install -e .`: they find the package as clipx does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from clipx import Trainer, compose
from clipx.config import Length
from clipx.distributed import Comm
from clipx.errors import ConfigError
from clipx.objective.base import StepInputs


def test_the_loss_equals_its_definition() -> None:
    objective = compose("objective=hardest_negative").objective
    built = objective.build(Comm(0, 1, 0, torch.device("cpu")), Length(100, 5))
    x, y = torch.nn.functional.normalize(torch.randn(2, 5, 4, dtype=torch.float64), dim=-1)
    s = (x @ y.T).tolist()
    others = [[j for j in range(5) if j != i] for i in range(5)]
    images = [max(0.0, 0.2 + max(s[i][j] for j in others[i]) - s[i][i]) for i in range(5)]
    texts = [max(0.0, 0.2 + max(s[j][i] for j in others[i]) - s[i][i]) for i in range(5)]
    loss, _ = built(StepInputs(x, y, torch.arange(5)))
    assert loss.item() == pytest.approx((sum(images) + sum(texts)) / 10)


def test_a_margin_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^objective\.margin=0\.0 must be above 0"):
        compose("objective=hardest_negative", "objective.margin=0")


def test_the_experiment_trains(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(32):
        Image.new("RGB", (48, 48), (8 * i, 0, 255 - 8 * i)).save(photos / f"{i}.jpg")
        (photos / f"{i}.txt").write_text(f"colour {i}\nnumber {i}\n")
    options = [
        f"data.folder={photos}",
        "data.held_out_share=0.25",
        "data.batch_size=8",
        "data.workers=0",
        "duration=3st",
    ]
    run = tmp_path / "run"
    Trainer(compose("experiment=sidecar_hinge", *options, "log_every=1st", "checkpoint=none", f"run_dir={run}")).fit()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/violations" in row] == [1, 2, 3]
    assert any("eval/retrieval/image_to_text/recall@1" in row for row in rows)
