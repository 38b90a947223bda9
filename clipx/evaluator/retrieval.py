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
    """Recall@1/5/10 and median rank, both ways. A tie counts against the right answer."""

    kind: str = "retrieval"

    def evaluate(self, embedder: Embedder, data: Dataset) -> Metrics:
        assert data.held_out is not None
        images = embedder.images(data.held_out, self.batch_size)
        texts = [caption for captions in images.captions for caption in captions]
        owner_M = torch.tensor([i for i, captions in enumerate(images.captions) for _ in captions])
        text_MD = embedder.texts(texts, self.batch_size)
        comm, image_ND = embedder.comm, images.image
        own_N = torch.arange(len(image_ND))
        return {
            **recalls("image_to_text", ranks(image_ND, own_N, text_MD, owner_M, comm)),
            **recalls("text_to_image", ranks(text_MD, owner_M, image_ND, own_N, comm)),
        }


def ranks(
    query_QD: torch.Tensor, owner_Q: torch.Tensor, key_KD: torch.Tensor, owner_K: torch.Tensor, comm: Comm
) -> torch.Tensor:
    """For each query the number of other owners' keys that score at least as high as its owner's best key."""
    from clipx.evaluator.base import blocks

    owner_Q, owner_K = owner_Q.to(key_KD.device), owner_K.to(key_KD.device)
    rank_Q = torch.zeros(len(query_QD), dtype=torch.int64, device=key_KD.device)
    for block in blocks(len(query_QD), _BLOCK, comm):
        scores_qK = query_QD[block] @ key_KD.T
        own_qK = owner_Q[block, None] == owner_K
        best_q1 = scores_qK.masked_fill(~own_qK, -torch.inf).amax(1, keepdim=True)
        rank_Q[block] = ((scores_qK >= best_q1) & ~own_qK).sum(1)
    return comm.sum(rank_Q).cpu()


def recalls(direction: str, rank_Q: torch.Tensor) -> Metrics:
    found = {f"{direction}/recall@{k}": (rank_Q < k).double().mean().item() for k in (1, 5, 10)}
    return {**found, f"{direction}/median_rank": 1 + rank_Q.double().median().item()}
