"""Retrieval metrics against their definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.color_model import dataset, embedder
from helpers.savers import run_in_processes
from hypothesis import given
from hypothesis import strategies as st

from clipx.distributed.comm import Comm
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
    """Returns ranks and hits of 10 queries among 14 keys, pairs of which tie, in blocks of 2 queries."""
    retrieval._BLOCK = 2
    generator = torch.Generator().manual_seed(0)
    query, key = (F.normalize(torch.randn(n, 5, generator=generator), dim=-1) for n in (10, 7))
    pairs = torch.stack([torch.arange(10), torch.arange(10) % 7], 1)
    search = Search(query, key, pairs, copies_K=torch.arange(14) % 7)
    return search.ranks(comm).tolist(), search.topk_hits(comm).tolist()


def test_ranks_share_the_queries_and_have_the_results_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "_BLOCK", 1024)
    alone = found_in_blocks(COMM)
    assert len(set(alone[0])) > 3
    assert run_in_processes(2, tmp_path, found_in_blocks) == [alone, alone]


def test_constant_embeddings_have_zero_recall() -> None:
    same, pairs = torch.ones(20, 3), torch.arange(20)[:, None].expand(20, 2)
    assert recalls("x", Search(same, same, pairs).ranks(COMM))["x/recall@10"] == 0


def test_recall_counts_ranks_below_k_and_median_rank_starts_at_1() -> None:
    found = recalls("x", torch.tensor([0, 0, 3, 7, 30]))
    shares = {"x/recall@1": 0.4, "x/recall@5": 0.6, "x/recall@10": 0.8}
    assert found == {**shares, "x/median_rank": 4.0, "x/samples": 5}


@given(
    queries=st.sets(st.integers(0, 11)),
    keys=st.sets(st.integers(0, 11)),
    value=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    entries=st.sampled_from([1, 5]),
)
def test_an_embedding_that_is_not_finite_is_never_right_and_never_in_the_way(
    queries: set[int], keys: set[int], value: float, entries: int
) -> None:
    """All other queries have the ranks and hits that they have without the broken keys. Each has two right keys."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.rand(12, 5, generator=generator) + 0.1 for _ in range(2))  # inf · positive is inf, not NaN
    pairs = torch.tensor([(i, (i + j) % 12) for i in range(12) for j in (0, 1)])
    broken_query, broken_key = query.clone(), key.clone()
    broken_query[list(queries), :entries] = value
    broken_key[list(keys), :entries] = value
    search = Search(broken_query, broken_key, pairs)
    ranks, hits = search.ranks(COMM), search.topk_hits(COMM)
    for i in range(12):
        right = {k for q, k in pairs.tolist() if q == i} - keys
        if i in queries or not right:
            assert ranks[i] >= 12 and not hits[i].any()
            continue
        score = {k: float(query[i] @ key[k]) for k in set(range(12)) - keys}
        rank = sum(score[k] >= max(score[r] for r in right) for k in score.keys() - right)
        assert ranks[i] == rank and hits[i].tolist() == [rank < k for k in (1, 5, 10)]


@pytest.mark.parametrize(("duplicates", "recall"), [(DuplicateCaptions.merged, 1.0), (DuplicateCaptions.apart, 2 / 3)])
def test_captions_of_equal_tokens_are_identical(duplicates: DuplicateCaptions, recall: float) -> None:
    """The first two images are equal, and so are the tokens of their captions."""
    data = dataset(["red", "red", "blue"], captions=[["a red dog"], [" A  RED dog"], ["a blue dog"]])
    found = RetrievalSpec(kind="retrieval", duplicate_captions=duplicates).evaluate(embedder(), data)
    assert found["image_to_text/recall@1"] == pytest.approx(recall)


def test_embeddings_that_are_not_finite_are_named(caplog: pytest.LogCaptureFixture) -> None:
    broken = embedder()
    encode = broken.model.encode_image
    broken.model.encode_image = lambda image: encode(image).masked_fill(image[:, :1, 0, 0] > 0, torch.nan)  # type: ignore[method-assign, assignment]
    found = RetrievalSpec(kind="retrieval").evaluate(broken, dataset(["red", "green", "blue", "green"]))
    assert [record.getMessage()[:48] for record in caplog.records] == [
        "1 of 4 embeddings of images are not finite and c"
    ]
    assert found["image_to_text/recall@1"] == 0.75 and found["text_to_image/recall@1"] == pytest.approx(2 / 3)
