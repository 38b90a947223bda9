"""Training on several captions of each sample, from a table with long captions to the metrics of a run."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from helpers.runs import SMALL, VIT, compose, events, losses, rows
from helpers.samples import jpeg

from clipx.trainer.trainer import Trainer

COLOURS = ("red", "green", "blue", "grey")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images: one caption of three sentences each, of which the last is that of three other images too."""
    folder = tmp_path_factory.mktemp("table")
    with (folder / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "caption"])
        for i in range(40):
            (folder / f"{i}.jpg").write_bytes(jpeg(i))
            writer.writerow([f"{i}.jpg", f"Picture {i}. It has waves! Its colour is {COLOURS[i % 4]}."])
    return folder / "train.csv"


def trained(run_dir: Path, table: Path, *words: str) -> Path:
    rest = [word for word in SMALL if "samples" not in word]
    of_table = ("data=csv", f"data.path={table}", "data.batch_size=16", "duration=3st", "schedule.warmup=1st")
    Trainer(compose(*rest, *VIT, *of_table, f"run_dir={run_dir}", "name=run", "checkpoint=none", *words)).fit()
    return run_dir


def test_sentences_of_one_caption_are_several_captions(tmp_path: Path, table: Path) -> None:
    """ "It has waves!" is a caption of all images, so that with mask few pairs with it are left."""
    run_dir = trained(
        tmp_path / "run", table, "data.sub_captions=1", "data.captions_per_step=3", "objective.same_caption=mask",
        "objective=siglip",
    )  # fmt: skip
    for row in rows(run_dir):
        assert row["train/repeated_captions"] == 0
        assert row["train/shared_captions"] > 0.5, "the second sentence, and most of the third"
    assert len(losses(run_dir)) == 3
    assert not [event for event in events(run_dir) if event["event"] == "repeated_captions"]


def test_one_caption_repeated_is_reported_and_gives_the_loss_of_one(tmp_path: Path, table: Path) -> None:
    run_dir = trained(tmp_path / "run", table, "data.captions_per_step=2", "objective=siglip")
    assert rows(run_dir)[0]["train/repeated_captions"] == 0.5
    (event,) = [event for event in events(run_dir) if event["event"] == "repeated_captions"]
    assert "data.captions_per_step=2 repeats one caption" in event["message"]
    # positive: the third batch has a sample of the end of the first epoch again, whose captions are right in both runs.
    alone = trained(tmp_path / "alone", table, "objective=siglip", "objective.same_caption=positive")
    torch.testing.assert_close(torch.tensor(losses(run_dir)), torch.tensor(losses(alone)), rtol=1e-4, atol=1e-4)
