"""Zero-shot metrics against their definition."""

from __future__ import annotations

import pytest
import torch
from helpers.color_model import dataset, embedder

from clipx.data.spec import Classes
from clipx.evaluator.zeroshot import ZeroShotSpec, first_of_repeated, scores


def test_mean_per_class_recall_weighs_classes_not_images() -> None:
    logits = torch.eye(3)[[0, 0, 0, 0]]  # of the last class is no image
    found = scores(logits, torch.tensor([0, 0, 0, 1]))
    assert found["top1"] == 0.75
    assert found["mean_per_class_recall"] == 0.5


def test_a_subset_is_scored_among_its_classes() -> None:
    classes = Classes(("red", "green", "blue"), ("{}",), {"few": (1, 2)})
    data = dataset(colours=["red", "green", "blue", "red"], labels=[0, 1, 2, 1], classes=classes)
    found = ZeroShotSpec(kind="zeroshot").evaluate(embedder(), data)
    assert found["few/chance"] == 0.5
    assert found["few/top1"] == pytest.approx(2 / 3), "the last image is red: the two classes of the subset tie"


def test_the_first_of_classes_with_the_same_name_wins() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.5], [0.1, 0.9, 0.1]])
    found = first_of_repeated(logits.clone(), ["a", "b", "a"])
    assert found.argmax(1).tolist() == [0, 1]
    assert (found[:, 0] > found[:, 2]).all()
    assert found == pytest.approx(logits, abs=1e-7)
    assert torch.equal(first_of_repeated(logits.clone(), ["a", "b", "c"]), logits)
