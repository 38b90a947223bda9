"""Values of `resume=`, and the checkpoints that they select."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.runs import VIT, small

from clipx.checkpoint.resume import Resume
from clipx.trainer.trainer import Trainer

FOUR = (*VIT, "checkpoint.every=1st", "checkpoint.keep_last=9")


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("auto", Resume(True)),
        ("latest", Resume(True, True)),
        ("step:30", Resume(True, True, 30)),
        ("outputs/mine/checkpoints/step-00000030", Resume(True, True, 30, run_dir="outputs/mine")),
        ("s3://bucket/outputs/mine", Resume(True, True, url="s3://bucket/outputs/mine")),
        ("s3://bucket/mine/checkpoints/step-00000030/", Resume(True, True, 30, url="s3://bucket/mine")),
        ("logs/theirs/checkpoints/epoch_3.pt", Resume(False, open_clip="logs/theirs/checkpoints/epoch_3.pt")),
    ],
)
def test_resume_values_are_parsed(text: str, meaning: Resume) -> None:
    assert Resume.parse(text) == meaning


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("done") / "run"
    Trainer(small(run_dir, *FOUR)).fit()
    return run_dir


@pytest.mark.parametrize("text", ["step:2", "{run}/checkpoints/step-00000002"])
def test_resuming_an_earlier_step_renames_the_later_checkpoints(tmp_path: Path, done: Path, text: str) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(done, run_dir)
    trainer = Trainer(small(run_dir, *FOUR, f"resume={text.format(run=run_dir)}"))
    trainer.close()
    assert trainer.steps_done == 2
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"step-00000001", "step-00000002", "step-00000003.left", "step-00000004.left"}
    again = Trainer(small(run_dir, *FOUR, "resume=auto"))
    again.close()
    assert again.steps_done == 2, "resume=auto selected a renamed later checkpoint"
