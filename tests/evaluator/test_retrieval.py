"""Retrieval numbers against their definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from stand_in import Told, dataset, embedder

from clipx.distributed import Comm
from clipx.errors import DataError
from clipx.evaluator.retrieval import RetrievalSpec, ranks, recalls

COMM = Comm(0, 1, 0, torch.device("cpu"))


def by_hand(query: torch.Tensor, own_q: list[int], key: torch.Tensor, own_k: list[int]) -> list[int]:
    found = []
    for q, owner in zip(query, own_q, strict=True):
        score = [float(q @ k) for k in key]
        best = max(s for s, o in zip(score, own_k, strict=True) if o == owner)
        found.append(sum(1 for s, o in zip(score, own_k, strict=True) if o != owner and s >= best))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_ranks_are_the_definition_with_several_captions_an_image(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    image = F.normalize(torch.randn(7, 5, generator=generator, dtype=torch.float64), dim=-1)
    owner = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 6])
    text = F.normalize(image[owner] + torch.randn(11, 5, generator=generator, dtype=torch.float64), dim=-1)
    own = torch.arange(7)
    assert ranks(image, own, text, owner, COMM).tolist() == by_hand(image, own.tolist(), text, owner.tolist())
    assert ranks(text, owner, image, own, COMM).tolist() == by_hand(text, owner.tolist(), image, own.tolist())


def test_a_model_that_says_the_same_of_everything_finds_nothing() -> None:
    same = torch.ones(20, 3)
    assert recalls("x", ranks(same, torch.arange(20), same, torch.arange(20), COMM))["x/recall@10"] == 0


def test_recall_counts_ranks_below_k_and_the_median_rank_counts_from_one() -> None:
    found = recalls("x", torch.tensor([0, 0, 3, 7, 30]))
    assert found == {"x/recall@1": 0.4, "x/recall@5": 0.6, "x/recall@10": 0.8, "x/median_rank": 4.0}


def test_images_and_captions_find_each_other() -> None:
    data = dataset(["red", "green", "blue"], captions=[["red", "red thing"], ["green"], ["blue one"]])
    found = RetrievalSpec(kind="retrieval", batch_size=2).evaluate(embedder(), data)
    assert found["image_to_text/recall@1"] == 1
    assert found["text_to_image/recall@1"] == 1
    assert found["text_to_image/median_rank"] == 1


def test_a_bad_held_out_sample_is_left_out_and_told() -> None:
    told = Told()
    data = dataset(["red", None, "blue"], captions=[["red"], ["green"], ["blue"]])
    found = RetrievalSpec(kind="retrieval").evaluate(embedder(told, max_bad_share=0.5), data)
    assert found["text_to_image/recall@1"] == 1
    assert [(b.key, b.reason) for b in told.bad] == [("picture 1", "no colour")]


def test_too_many_bad_held_out_samples_are_an_error() -> None:
    data = dataset(["red", None, None], captions=[["red"], ["green"], ["blue"]])
    with pytest.raises(DataError, match=r"2 of 3 held-out samples are bad, more than data.max_bad_share=0.5"):
        RetrievalSpec(kind="retrieval").evaluate(embedder(max_bad_share=0.5), data)
