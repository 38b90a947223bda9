"""Retrieval among the held-out pairs: text to image and image to text, with any number of captions for an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipx.config import option
from clipx.data import Dataset
from clipx.evaluator import EvaluatorSpec
from clipx.lazy import torch

if TYPE_CHECKING:
    from clipx.distributed import Comm
    from clipx.evaluator.base import Embedder, Metrics

_BLOCK = 1024  # rows scored at a time


@option("evaluator")
@dataclass(kw_only=True, slots=True)
class RetrievalSpec(EvaluatorSpec):
    """Recall@1/5/10 and median rank, both ways.

    Captions that read the same are one caption, right for every image that has it. A tie counts against the right
    answer, so that a model that says the same of everything finds nothing.
    """

    kind: str = "retrieval"

    def evaluate(self, embedder: Embedder, data: Dataset) -> Metrics:
        assert data.held_out is not None
        images = embedder.images(data.held_out, self.batch_size)
        number = {text: i for i, text in enumerate(dict.fromkeys(t for texts in images.captions for t in texts))}
        text_MD = embedder.texts(list(number), self.batch_size)
        pairs = [(i, number[text]) for i, texts in enumerate(images.captions) for text in dict.fromkeys(texts)]
        pairs_P2 = torch.tensor(pairs)
        return {
            **recalls("image_to_text", ranks(images.image, text_MD, pairs_P2, embedder.comm)),
            **recalls("text_to_image", ranks(text_MD, images.image, pairs_P2.flip(1), embedder.comm)),
        }


def ranks(query_QD: torch.Tensor, key_KD: torch.Tensor, pairs_P2: torch.Tensor, comm: Comm) -> torch.Tensor:
    """For each query the number of wrong keys that score at least as high as the best of its right ones.

    `pairs_P2` holds (query, key) for each right answer. Spread over the ranks; the result is on all of them.
    """
    from clipx.evaluator.base import blocks

    pairs_P2 = pairs_P2.to(key_KD.device)
    rank_Q = torch.zeros(len(query_QD), dtype=torch.int64, device=key_KD.device)
    for block in blocks(len(query_QD), _BLOCK, comm):
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
