"""Retrieval metrics against their definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.color_model import Told, dataset, embedder
from helpers.savers import run_in_processes

from clipx.distributed.comm import Comm
from clipx.errors import ConfigError, DataError
from clipx.evaluator import retrieval
from clipx.evaluator.retrieval import DuplicateCaptions, RetrievalSpec, Search, recalls

COMM = Comm(0, 1, 0, torch.device("cpu"))


def by_hand(query: torch.Tensor, key: torch.Tensor, pairs: list[tuple[int, int]]) -> list[int]:
    found = []
    for i, q in enumerate(query):
        score = [float(q @ k) for k in key]
        right = {k for j, k in pairs if j == i}
        best = max(score[k] for k in right)
        found.append(sum(1 for k, s in enumerate(score) if k not in right and s >= best))
    return found


def test_ranks_with_several_captions_per_image_match_the_definition() -> None:
    """Images 0, 2 and 6 have several captions; caption 3 is right for two images."""
    generator = torch.Generator().manual_seed(0)
    pairs = [(0, 0), (0, 1), (1, 2), (2, 3), (2, 4), (2, 5), (3, 6), (3, 3), (4, 7), (5, 8), (6, 9), (6, 10)]
    back = [(t, i) for i, t in pairs]
    for _ in range(4):
        image, text = (
            F.normalize(torch.randn(n, 5, generator=generator, dtype=torch.float64), dim=-1) for n in (7, 11)
        )
        assert Search(image, text, torch.tensor(pairs)).ranks(COMM).tolist() == by_hand(image, text, pairs)
        assert Search(text, image, torch.tensor(back)).ranks(COMM).tolist() == by_hand(text, image, back)


def found_in_blocks(comm: Comm) -> tuple[list[int], list[list[bool]]]:
    """Returns ranks and hits of 10 queries among 7 keys, in blocks of 2 queries."""
    retrieval._BLOCK = 2
    generator = torch.Generator().manual_seed(0)
    query, key = (F.normalize(torch.randn(n, 5, generator=generator), dim=-1) for n in (10, 7))
    search = Search(query, key, torch.stack([torch.arange(10), torch.arange(10) % 7], 1))
    return search.ranks(comm).tolist(), search.topk_hits(comm).tolist()


def test_ranks_share_the_queries_and_have_the_results_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "_BLOCK", 1024)
    alone = found_in_blocks(COMM)
    assert len(set(alone[0])) > 3
    assert run_in_processes(2, tmp_path, found_in_blocks) == [alone, alone]


def test_constant_embeddings_have_zero_recall() -> None:
    same, pairs = torch.ones(20, 3), torch.arange(20)[:, None].expand(20, 2)
    assert recalls("x", Search(same, same, pairs).ranks(COMM))["x/recall@10"] == 0


def test_duplicate_captions_can_be_counted_apart() -> None:
    """The example of docs/guides/evaluation.md: images A and B are red, C is blue; A has its caption twice."""
    data = dataset(["red", "red", "blue"], captions=[["red", "red"], ["red"], ["blue"]])
    merged = RetrievalSpec(kind="retrieval").evaluate(embedder(), data)
    assert merged["image_to_text/recall@1"] == merged["text_to_image/recall@1"] == 1
    apart = RetrievalSpec(kind="retrieval", duplicate_captions=DuplicateCaptions.apart).evaluate(embedder(), data)
    assert apart["image_to_text/recall@1"] == pytest.approx(2 / 3), "A or B, whose first caption topk takes"
    assert apart["text_to_image/recall@1"] in (pytest.approx(2 / 4), pytest.approx(3 / 4)), (
        "as many as topk's image has"
    )
    assert apart["text_to_image/recall@5"] == 1


def test_topk_chooses_among_ties_and_hits_of_equal_keys_do_not_depend_on_rounding() -> None:
    """Keys 0 to 19 are equal, so their scores are, and a query hits if topk returns its own copy."""
    generator = torch.Generator().manual_seed(0)
    query, key = (F.normalize(torch.randn(n, 37, generator=generator), dim=-1) for n in (20, 3))
    copies = torch.tensor([0] * 20 + [1, 2])
    pairs = torch.arange(20)[:, None].expand(20, 2)
    for i, k in enumerate((1, 5, 10)):
        first = (query @ key.T)[:, copies].topk(k, dim=1).indices
        expected = (first == torch.arange(20)[:, None]).any(1)
        assert torch.equal(Search(query, key, pairs, copies).topk_hits(COMM)[:, i], expected)


def test_samples_without_captions_raise_an_error_before_training() -> None:
    data = dataset(["red", "blue"], captions=[["red"], []])
    with pytest.raises(ConfigError, match="retrieval needs captions, and the held-out data has samples without"):
        RetrievalSpec(kind="retrieval").check(data)


def test_recall_counts_ranks_below_k_and_median_rank_starts_at_1() -> None:
    found = recalls("x", torch.tensor([0, 0, 3, 7, 30]))
    assert found == {"x/recall@1": 0.4, "x/recall@5": 0.6, "x/recall@10": 0.8, "x/median_rank": 4.0}


def test_matching_and_shared_captions_have_full_recall() -> None:
    captions = [["red", "red thing"], ["green"], ["blue one"], ["red", "red thing"]]
    data = dataset(["red", "green", "blue", "red"], captions=captions)
    found = RetrievalSpec(kind="retrieval", batch_size=2).evaluate(embedder(), data)
    assert found["image_to_text/recall@1"] == 1
    assert found["text_to_image/recall@1"] == 1
    assert found["text_to_image/median_rank"] == 1


def test_a_bad_held_out_sample_is_skipped_and_reported_and_too_many_are_an_error() -> None:
    told = Told()
    data = dataset(["red", None, "blue"], captions=[["red"], ["green"], ["blue"]])
    found = RetrievalSpec(kind="retrieval").evaluate(embedder(told, max_bad_share=0.5), data)
    assert found["text_to_image/recall@1"] == 1
    assert [(b.key, b.reason) for b in told.bad] == [("picture 1", "no colour")]
    with pytest.raises(DataError, match=r"1 of 3 held-out samples are bad, more than data.max_bad_share=0.25"):
        RetrievalSpec(kind="retrieval").evaluate(embedder(max_bad_share=0.25), data)
