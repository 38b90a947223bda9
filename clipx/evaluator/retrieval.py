"""Retrieval among the held-out pairs: text to image and image to text, with any number of captions for an image."""

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

_BLOCK = 1024  # rows scored at a time
_WAYS = ("image_to_text", "text_to_image")


class DuplicateCaptions(StrEnum):
    """Captions of several images that read the same."""

    merged = "merged"  # one caption, right for every image that has it
    apart = "apart"  # one for each image, and wrong for the others, as clip_benchmark counts


@option("evaluator")
@dataclass(kw_only=True, slots=True)
class RetrievalSpec(EvaluatorSpec):
    """Recall@1/5/10 and median rank, both ways.

    A query has found its answer where any of its right ones is among the first. A tie counts against the right answer,
    so that a model that says the same of everything finds nothing.
    """

    parts: ClassVar[tuple[str, ...]] = _WAYS
    compared: ClassVar[tuple[str, ...]] = tuple(f"{way}/recall@{k}" for k in (1, 5) for way in _WAYS)

    kind: str = "retrieval"
    duplicate_captions: DuplicateCaptions = DuplicateCaptions.merged

    def check(self, data: Dataset) -> None:
        from clipx.evaluator.base import preview

        assert data.held_out is not None
        if any(not sample.captions for sample in preview(data.held_out)):
            raise ConfigError(
                "retrieval needs captions and the held-out data has samples without: choose data that has, or leave "
                "retrieval out with evaluator=[zeroshot]"
            )

    def evaluate(self, embedder: Embedder, data: Dataset) -> Metrics:
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
    """(image, text) of each caption that an image has."""
    number = {text: i for i, text in enumerate(texts)}
    return [(image, number[text]) for image, own in enumerate(captions) for text in dict.fromkeys(own)]


def ranks(query_QD: torch.Tensor, key_KD: torch.Tensor, pairs_P2: torch.Tensor, comm: Comm) -> torch.Tensor:
    """For each query the number of wrong keys that score at least as high as the best of its right ones.

    `pairs_P2` holds (query, key) for each right answer. Spread over the ranks; the result is on all of them.
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
    found = {f"{direction}/recall@{k}": (rank_Q < k).double().mean().item() for k in (1, 5, 10)}
    return {**found, f"{direction}/median_rank": 1 + rank_Q.double().median().item()}
