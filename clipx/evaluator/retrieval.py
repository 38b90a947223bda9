"""Image-text retrieval among the held-out samples, in both directions, with any number of captions per image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import option
from clipx.data.spec import Dataset
from clipx.errors import ConfigError
from clipx.evaluator.spec import EvaluatorSpec

if TYPE_CHECKING:
    from clipx.distributed.comm import Comm
    from clipx.evaluator.base import Embedder, Metrics

_BLOCK = 1024  # queries per matrix product
_WAYS = ("image_to_text", "text_to_image")


class DuplicateCaptions(StrEnum):
    """Treatment of identical captions of several images."""

    merged = "merged"
    """One caption, which is a correct answer for every image that has it."""

    apart = "apart"
    """One caption per image, which is a wrong answer for the other images, as in clip_benchmark."""


@option("evaluator")
@dataclass(kw_only=True, slots=True)
class RetrievalSpec(EvaluatorSpec):
    """Recall@1/5/10 and median rank of image-to-text and text-to-image retrieval.

    Recall@k is the share of queries with at least one correct answer among the first k. A tie counts against the
    correct answer, so equal scores count as wrong.
    """

    parts: ClassVar[tuple[str, ...]] = _WAYS
    compared: ClassVar[tuple[str, ...]] = tuple(f"{way}/recall@{k}" for k in (1, 5) for way in _WAYS)

    kind: str = "retrieval"
    """Kind of evaluator: retrieval."""

    duplicate_captions: DuplicateCaptions = DuplicateCaptions.merged
    """Treatment of identical captions of several images. merged: one caption, which is correct for every image that has
    it. apart: one caption per image, which is wrong for the other images, as in clip_benchmark."""

    def check(self, data: Dataset) -> None:
        """Raises ConfigError if the held-out data has samples without captions."""
        from clipx.evaluator.base import preview

        assert data.held_out is not None
        if any(not sample.captions for sample in preview(data.held_out)):
            raise ConfigError(
                "retrieval needs captions, and the held-out data has samples without a caption: choose other data, or "
                "drop retrieval with evaluator=[zeroshot]"
            )

    def evaluate(self, embedder: Embedder, data: Dataset) -> Metrics:
        """Returns recall@1, recall@5, recall@10 and median_rank of both directions. Collective."""
        assert data.held_out is not None
        images = embedder.images(data.held_out, self.batch_size)
        texts = list(dict.fromkeys(text for texts in images.captions for text in texts))
        text_MD = embedder.texts(texts, self.batch_size)
        pairs_P2 = torch.tensor(_pairs(images.captions, texts))
        if self.duplicate_captions is DuplicateCaptions.apart:
            text_MD = text_MD[pairs_P2[:, 1].to(text_MD.device)]
            pairs_P2[:, 1] = torch.arange(len(pairs_P2))
        to_text, to_image = _WAYS
        return {
            **recalls(to_text, ranks(images.image, text_MD, pairs_P2, embedder.comm)),
            **recalls(to_image, ranks(text_MD, images.image, pairs_P2.flip(1), embedder.comm)),
        }


def _pairs(captions: Sequence[Sequence[str]], texts: Sequence[str]) -> list[tuple[int, int]]:
    """Returns (index of the image, index of the text) of each distinct caption of each image."""
    number = {text: i for i, text in enumerate(texts)}
    return [(image, number[text]) for image, its_texts in enumerate(captions) for text in dict.fromkeys(its_texts)]


def ranks(query_QD: torch.Tensor, key_KD: torch.Tensor, pairs_P2: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Returns the rank [Q] of each query's best correct key: the number of wrong keys with at least its score.

    Collective. The queries are distributed over the ranks; every rank gets the whole result.

    Args:
        query_QD: embeddings of the queries.
        key_KD: embeddings of the keys.
        pairs_P2: (query, key) of each correct answer.
    """
    from clipx.evaluator.base import rank_blocks

    pairs_P2 = pairs_P2.to(key_KD.device)
    rank_Q = torch.zeros(len(query_QD), dtype=torch.int64, device=key_KD.device)
    for block in rank_blocks(len(query_QD), _BLOCK, comm):
        scores_qK = query_QD[block] @ key_KD.T
        right_qK = torch.zeros_like(scores_qK, dtype=torch.bool)
        here = pairs_P2[(pairs_P2[:, 0] >= block.start) & (pairs_P2[:, 0] < block.stop)]
        right_qK[here[:, 0] - block.start, here[:, 1]] = True
        best_q1 = scores_qK.masked_fill(~right_qK, -torch.inf).amax(1, keepdim=True)
        rank_Q[block] = ((scores_qK >= best_q1) & ~right_qK).sum(1)
    return comm.sum(rank_Q).cpu()


def recalls(direction: str, rank_Q: torch.Tensor) -> Metrics:
    """Returns recall@1/5/10 and the median rank, which counts from 1. `direction`: prefix of the metric names."""
    found = {f"{direction}/recall@{k}": (rank_Q < k).double().mean().item() for k in (1, 5, 10)}
    return {**found, f"{direction}/median_rank": 1 + rank_Q.double().median().item()}
