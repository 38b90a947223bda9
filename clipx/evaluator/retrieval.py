"""Image-text retrieval among the held-out samples, in both directions, with any number of captions per image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import frozen, register
from clipx.data.spec import Dataset
from clipx.errors import ConfigError
from clipx.evaluator.spec import EvaluatorSpec

if TYPE_CHECKING:
    from clipx.distributed.comm import Comm
    from clipx.evaluator.base import Embedder, Metrics
    from clipx.model.tokenizer import Tokenizer

_BLOCK = 1024  # queries per matrix product
_CUTOFFS = (1, 5, 10)  # k of recall@k
_WAYS = ("image_to_text", "text_to_image")


class DuplicateCaptions(StrEnum):
    """Treatment of identical captions."""

    merged = "merged"
    """One caption, which is a correct answer for every image that has it. Captions are identical if their tokens
    are."""

    apart = "apart"
    """One caption per occurrence, which is a correct answer for its image alone, as in clip_benchmark."""


@register("evaluator")
@frozen
class RetrievalSpec(EvaluatorSpec):
    """Recall@1/5/10 and median rank of image-to-text and text-to-image retrieval.

    Recall@k is the share of queries with at least one correct answer among the first k. A tie counts against the
    correct answer, so equal scores count as wrong, except with duplicate_captions=apart. An embedding that is not
    finite is no answer, and a query with it has none.
    """

    parts: ClassVar[tuple[str, ...]] = _WAYS
    compared: ClassVar[tuple[str, ...]] = tuple(f"{way}/recall@{k}" for k in (1, 5) for way in _WAYS)
    metrics: ClassVar[tuple[str, ...]] = tuple(
        f"{way}/{metric}" for way in _WAYS for metric in (*(f"recall@{k}" for k in _CUTOFFS), "median_rank")
    )

    kind: str = "retrieval"
    """Kind of evaluator: retrieval."""

    duplicate_captions: DuplicateCaptions = DuplicateCaptions.merged
    """Treatment of identical captions, whose tokens are equal. merged: one caption, which is correct for every image
    that has it. apart: one caption per occurrence, which is correct for its image alone; topk orders ties, as in
    clip_benchmark."""

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
        """Returns recall@1, recall@5, recall@10, median_rank and samples of both directions. Collective."""
        from clipx.evaluator.predictions import Compared

        assert data.held_out is not None
        images = embedder.images(data.held_out, self.batch_size)
        captions = distinct(images.captions, embedder.tokenizer)
        texts = list(dict.fromkeys(text for texts in captions for text in texts))
        text_MD = embedder.texts(texts, self.batch_size)
        embedder.compared(Compared("captions", data.held_out, images, texts, text_MD, captions))
        pairs_P2 = torch.tensor(_pairs(captions, texts))
        if self.duplicate_captions is DuplicateCaptions.merged:
            pairs_P2 = pairs_P2.unique(dim=0)
            searches = Search(images.image, text_MD, pairs_P2), Search(text_MD, images.image, pairs_P2.flip(1))
        else:
            copies_P = pairs_P2[:, 1].to(text_MD.device)
            pairs_P2 = torch.stack([pairs_P2[:, 0], torch.arange(len(pairs_P2))], 1)
            to_text = Search(images.image, text_MD, pairs_P2, copies_P)
            searches = to_text, Search(text_MD[copies_P], images.image, pairs_P2.flip(1))
        found: Metrics = {}
        for way, search in zip(_WAYS, searches, strict=True):
            rank_Q = search.ranks(embedder.comm)
            apart = self.duplicate_captions is DuplicateCaptions.apart
            found |= recalls(way, rank_Q, search.topk_hits(embedder.comm) if apart else None)
        return found


def distinct(captions: Sequence[Sequence[str]], tokenizer: Tokenizer) -> list[list[str]]:
    """Returns the captions of each image, with the first of equal tokens in place of each.

    Otherwise the rounding of equal scores, which depends on the number of ranks, would order them.
    """
    from clipx.evaluator.base import first_equal

    texts = list(dict.fromkeys(text for texts in captions for text in texts))
    first = {text: texts[at] for text, at in zip(texts, first_equal(tokenizer, texts), strict=True)}
    return [[first[text] for text in texts] for texts in captions]


def _pairs(captions: Sequence[Sequence[str]], texts: Sequence[str]) -> list[tuple[int, int]]:
    """Returns (index of the image, index of the text) of each caption of each image."""
    number = {text: i for i, text in enumerate(texts)}
    return [(image, number[text]) for image, its_texts in enumerate(captions) for text in its_texts]


@dataclass(frozen=True, slots=True)
class Search:
    """A search of K keys for each of Q queries. The ranks of a job share the queries; each gets the whole result."""

    query_QD: torch.Tensor
    """Embeddings of the queries."""

    key_UD: torch.Tensor
    """Embeddings of the distinct keys."""

    pairs_P2: torch.Tensor
    """(query, key) of each correct answer."""

    copies_K: torch.Tensor | None = None
    """Row of `key_UD` of each key, which gives equal keys exactly equal scores. None: each row is a key."""

    def ranks(self, comm: Comm) -> torch.Tensor:
        """Returns the rank [Q] of each query's best correct key: the number of wrong keys with at least its score. A
        query without a finite score of a correct key is behind all keys and cutoffs. Collective."""
        rank_Q = torch.zeros(len(self.query_QD), dtype=torch.int64, device=self.key_UD.device)
        for block, scores_qK, right_qK in self._scores(comm):
            best_q1 = scores_qK.masked_fill(~right_qK, -torch.inf).amax(1, keepdim=True)
            rank_Q[block] = ((scores_qK >= best_q1) & ~right_qK).sum(1)
            rank_Q[block].masked_fill_(best_q1[:, 0] == -torch.inf, max(scores_qK.shape[1], *_CUTOFFS))
        return comm.sum(rank_Q).cpu()

    def topk_hits(self, comm: Comm) -> torch.Tensor:
        """Returns whether a correct key is among the first 1, 5 and 10 of each query, [Q, 3]. Collective.

        `topk` chooses among ties, as in clip_benchmark: its choice depends on k and on the order of the scores, not on
        their values.
        """
        hits_Q3 = torch.zeros(len(self.query_QD), len(_CUTOFFS), dtype=torch.int64, device=self.key_UD.device)
        for block, scores_qK, right_qK in self._scores(comm):
            for i, k in enumerate(_CUTOFFS):
                first_qk = scores_qK.topk(min(k, scores_qK.shape[1]), dim=1).indices
                hits_Q3[block, i] = right_qK.gather(1, first_qk).any(1).long()
        return comm.sum(hits_Q3).cpu() > 0

    def _scores(self, comm: Comm) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yields this rank's blocks of queries, their scores with all keys, and whether each key is correct.

        A score that is not finite is -inf, and its key is not correct.
        """
        from clipx.evaluator.base import rank_blocks
        from clipx.model.transfer import moved

        for block in rank_blocks(len(self.query_QD), _BLOCK, comm):
            scores_qK = self.query_QD[block] @ self.key_UD.T
            if self.copies_K is not None:  # after the product, which may round the scores of equal keys differently
                scores_qK = scores_qK[:, self.copies_K]
            right_qK = torch.zeros_like(scores_qK, dtype=torch.bool)
            of_block_P = (self.pairs_P2[:, 0] >= block.start) & (self.pairs_P2[:, 0] < block.stop)
            here = moved(self.pairs_P2[of_block_P], scores_qK.device)  # selected on the host, where nothing waits
            right_qK[here[:, 0] - block.start, here[:, 1]] = True
            right_qK &= scores_qK.isfinite()
            scores_qK.nan_to_num_(-torch.inf, -torch.inf, -torch.inf)
            yield block, scores_qK, right_qK


def recalls(direction: str, rank_Q: torch.Tensor, hits_Q3: torch.Tensor | None = None) -> Metrics:
    """Returns recall@1/5/10, the median rank, which counts from 1, and the number of queries.

    `direction`: prefix of the metric names.

    `hits_Q3`: see `Search.topk_hits`. None: a query hits if its rank is below k.
    """
    hits_Q3 = rank_Q[:, None] < torch.tensor(_CUTOFFS) if hits_Q3 is None else hits_Q3
    shares = hits_Q3.double().mean(0).tolist()
    found = {f"{direction}/recall@{k}": share for k, share in zip(_CUTOFFS, shares, strict=True)}
    found |= {f"{direction}/median_rank": 1 + rank_Q.double().median().item()}
    return {**found, f"{direction}/samples": len(rank_Q)}
