"""Zero-shot metrics against their definition."""

from __future__ import annotations

import pytest
import torch
from helpers.color_model import dataset, embedder
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.spec import Classes
from clipx.evaluator.zeroshot import ZeroShotSpec, first_of_repeated, scores

NAN, INF = float("nan"), float("inf")


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
    found = first_of_repeated(logits.clone(), [0, 1, 0])
    assert found.argmax(1).tolist() == [0, 1]
    assert (found[:, 0] > found[:, 2]).all()
    assert found == pytest.approx(logits, abs=1e-7)
    assert torch.equal(first_of_repeated(logits.clone(), [0, 1, 2]), logits)


def test_the_first_of_classes_whose_names_have_equal_tokens_wins() -> None:
    classes = Classes(("red", "blue", "RED "), ("a {}",))
    data = dataset(colours=["red", "blue", "red"], labels=[0, 1, 2], classes=classes)
    assert ZeroShotSpec(kind="zeroshot").evaluate(embedder(), data)["top1"] == pytest.approx(2 / 3)


@given(
    broken=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=20), at=st.sampled_from([NAN, INF, -INF])
)
def test_a_logit_that_is_not_finite_is_never_right_and_never_in_the_way(
    broken: list[tuple[int, int]], at: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(6, 8, generator=generator), torch.arange(6)
    for row, column in broken:
        logits[row, column] = at
    hits = [
        [x.isfinite().item() and (row[row.isfinite()] > x).sum() < k for k in (1, 5)]
        for row, x in zip(logits, logits.diagonal(), strict=True)
    ]
    found = scores(logits, labels)
    assert (found["top1"], found["top5"]) == pytest.approx(tuple(torch.tensor(hits).double().mean(0).tolist()))
