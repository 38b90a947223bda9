"""Retrieval metrics against their definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.savers import run_in_processes

from clipx.distributed.comm import Comm
from clipx.evaluator import retrieval
from clipx.evaluator.retrieval import Search, recalls

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


def test_recall_counts_ranks_below_k_and_median_rank_starts_at_1() -> None:
    found = recalls("x", torch.tensor([0, 0, 3, 7, 30]))
    shares = {"x/recall@1": 0.4, "x/recall@5": 0.6, "x/recall@10": 0.8}
    assert found == {**shares, "x/median_rank": 4.0, "x/samples": 5}
