"""Generates captions token by token: greedily, by sampling, or by beam search.

The keys and values of text tokens and images are cached. A caption depends only on its image and its number, not on the
other images of its batch.

Shape suffixes: B images, R beams of an image, N unfinished texts, L tokens so far, W width, H heads, K width of a head,
V vocabulary, P tokens of an image, M texts that continue.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipx.extra.coca.decoder import CrossBlock, DecoderBlock, join_heads, split_heads
from clipx.extra.coca.model import CoCa
from clipx.model.text import TextBlock
from clipx.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Caption:
    """Generated caption. log_p: log probability of all tokens and the end, by the model's softmax over the whole
    vocabulary, for any method."""

    tokens: list[int]  # without start and end
    log_p: float


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """Bounds on the number of tokens of a caption, without start and end."""

    minimum: int
    maximum: int


class Decoding(Protocol):
    """State of N unfinished texts of the same length."""

    start: int
    end: int

    def feed(self, token_N: Tensor) -> Tensor:
        """Appends a token to each text. Returns the scores of the next token, [N, V]."""

    def select(self, row_M: Tensor) -> None:
        """Continues with the texts of these indices, which may repeat."""


KeysValues = tuple[Tensor, Tensor]
"""Keys and values of an attention layer, each [N, H, L, K]."""

Method = Callable[[Decoding, Sequence[int], LengthBounds], list[Caption]]
"""Decoding method: (decoding of B texts, number of each image, bounds) -> one caption per image."""


def generate_captions(
    model: CoCa, image_B3SS: Tensor, numbers: Sequence[int], method: Method, bounds: LengthBounds
) -> list[Caption]:
    """Returns one caption per image. Takes images as encode_image does. `numbers`: index of each among all images.

    Raises ValueError if `bounds` do not fit the model's context.
    """
    room = model.text.context_length - 2
    if not 0 <= bounds.minimum <= bounds.maximum <= room:
        raise ValueError(f"{bounds} must be in [0, {room}], the context without start and end: change the bounds")
    with torch.inference_mode():
        return method(CoCaDecoding(model, model.image_tokens(image_B3SS)), numbers, bounds)


# ------------------------------------------------------------------------------------------------- sampling


def greedy(decoding: Decoding, numbers: Sequence[int], bounds: LengthBounds) -> list[Caption]:
    """Selects the likeliest token at each step."""
    return _decode(decoding, len(numbers), bounds, lambda scores_MV, rows, length: scores_MV.argmax(1))


@dataclass(frozen=True, slots=True)
class Sampling:
    """Draws each token from softmax(scores / temperature), restricted to the top_k likeliest tokens, and of these to
    the smallest set of likeliest ones whose share reaches top_p (arXiv:1904.09751), as in transformers. The result is a
    function of the seed and the number of the image."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __call__(self, decoding: Decoding, numbers: Sequence[int], bounds: LengthBounds) -> list[Caption]:
        drawn = [_uniform(f"{self.seed}/{number}", bounds.maximum) for number in numbers]

        def choose(scores_MV: Tensor, rows: Sequence[int], length: int) -> Tensor:
            u_M = torch.tensor([drawn[row][length] for row in rows], dtype=torch.float64)
            return self.draw(scores_MV, u_M.to(scores_MV.device))

        return _decode(decoding, len(numbers), bounds, choose)

    def draw(self, scores_MV: Tensor, u_M: Tensor) -> Tensor:
        """Draws one of V tokens for each row. u_M: random numbers, uniform in [0, 1)."""
        p_MV, token_MV = (scores_MV.double() / self.temperature).softmax(1).sort(dim=1, descending=True, stable=True)
        if self.top_k is not None:
            p_MV[:, self.top_k :] = 0
            p_MV /= p_MV.sum(1, keepdim=True)
        before_MV = p_MV.cumsum(1) - p_MV
        p_MV = p_MV.masked_fill(before_MV >= self.top_p, 0)
        upto_MV = p_MV.cumsum(1)
        last_M1 = (p_MV > 0).sum(1, keepdim=True) - 1  # limit for rounding errors
        place_M1 = torch.searchsorted(upto_MV, u_M[:, None] * upto_MV[:, -1:], right=True)
        return token_MV.gather(1, torch.minimum(place_M1, last_M1)).squeeze(1)


def _uniform(seed: str, count: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.random() for _ in range(count)]


def _decode(
    decoding: Decoding, texts: int, bounds: LengthBounds, choose: Callable[[Tensor, Sequence[int], int], Tensor]
) -> list[Caption]:
    """Decodes all texts. `choose`: (scores [M, V], index of the text of each row, length so far) -> tokens [M]."""
    tokens: list[list[int]] = [[] for _ in range(texts)]
    log_p = [0.0] * texts
    rows = list(range(texts))
    token_M = torch.full((texts,), decoding.start)
    for length in range(bounds.maximum + 1):
        scores_MV = decoding.feed(token_M)
        if length < bounds.maximum:
            token_M = choose(_allowed(scores_MV, decoding, length, bounds), rows, length)
        else:
            token_M = torch.full((len(rows),), decoding.end, device=scores_MV.device)
        log_M = scores_MV.log_softmax(1).gather(1, token_M[:, None]).squeeze(1)
        chosen, token_log_ps = token_M.tolist(), log_M.tolist()
        for row, token, token_log_p in zip(rows, chosen, token_log_ps, strict=True):
            log_p[row] += token_log_p
            if token != decoding.end:
                tokens[row].append(token)
        unfinished = [i for i, token in enumerate(chosen) if token != decoding.end]
        if not unfinished:
            break
        if len(unfinished) < len(rows):
            unfinished_M = torch.tensor(unfinished, device=token_M.device)
            decoding.select(unfinished_M)
            token_M, rows = token_M[unfinished_M], [rows[i] for i in unfinished]
    return [Caption(*found) for found in zip(tokens, log_p, strict=True)]


def _allowed(scores_NV: Tensor, decoding: Decoding, length: int, bounds: LengthBounds) -> Tensor:
    """Returns the scores with the start token masked, and the end token too below the minimum length."""
    scores_NV = scores_NV.clone()
    scores_NV[:, decoding.start] = -torch.inf
    if length < bounds.minimum:
        scores_NV[:, decoding.end] = -torch.inf
    return scores_NV


# ---------------------------------------------------------------------------------------------------- beam search


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search with `count` beams per image. Selects the caption with the largest log p / length^length_penalty, the
    end token counted in both. A length_penalty of 0 ranks by probability alone, which favors short captions."""

    count: int = 6
    length_penalty: float = 1.0

    def __call__(self, decoding: Decoding, numbers: Sequence[int], bounds: LengthBounds) -> list[Caption]:
        images, r = len(numbers), self.count
        best = [Caption([], -torch.inf)] * images
        score = [-torch.inf] * images
        token_BRL: list[list[list[int]]] = [[[] for _ in range(r)] for _ in range(images)]
        decoding.select(torch.arange(images).repeat_interleave(r))
        token_N = torch.full((images * r,), decoding.start)
        log_BR: Tensor | None = None
        for length in range(bounds.maximum + 1):
            step_BRV = decoding.feed(token_N).log_softmax(1).unflatten(0, (images, r))
            if log_BR is None:  # all beams are the same: continue only the first
                log_BR = step_BRV.new_tensor([0.0] + [-torch.inf] * (r - 1)).expand(images, -1)
            log_BRV = log_BR[..., None] + step_BRV
            if length >= bounds.minimum:
                log_B, beam_B = log_BRV[..., decoding.end].max(1)
                for i, (log, beam) in enumerate(zip(log_B.tolist(), beam_B.tolist(), strict=True)):
                    if (ended := self.score(log, length + 1)) > score[i]:
                        score[i], best[i] = ended, Caption(token_BRL[i][beam], log)
            if length == bounds.maximum:
                break
            log_BRV[..., [decoding.start, decoding.end]] = -torch.inf
            log_BR, flat_BR = log_BRV.flatten(1).topk(r)
            # Upper bound of what a beam can reach: probability only falls with further tokens, and the length penalty
            # is largest at the maximum length.
            bound = [self.score(log, bounds.maximum + 1) for log in log_BR[:, 0].tolist()]
            if all(reached >= limit for reached, limit in zip(score, bound, strict=True)):
                break
            parent_BR = flat_BR // log_BRV.shape[2]
            token_BR = flat_BR % log_BRV.shape[2]
            token_BRL = [
                [[*beams[p], t] for p, t in zip(parents, tokens, strict=True)]
                for beams, parents, tokens in zip(token_BRL, parent_BR.tolist(), token_BR.tolist(), strict=True)
            ]
            first_B1 = torch.arange(images, device=parent_BR.device)[:, None] * r
            decoding.select((first_B1 + parent_BR).flatten())
            token_N = token_BR.flatten()
        return best

    def score(self, log_p: float, length: int) -> float:
        return log_p / float(length**self.length_penalty)


# ------------------------------------------------------------------------------------------------------- the model


class CoCaDecoding:
    """Decoding of texts by a CoCa from image tokens; see Decoding.

    The texts of an image share its keys and values as long as they are contiguous and every image has the same number.
    """

    start, end = Tokenizer.start_id, Tokenizer.end_id

    def __init__(self, model: CoCa, image_BPW: Tensor) -> None:
        """image_BPW: image tokens from model.image_tokens."""
        self.text, self.decoder, self.device = model.text, model.decoder, image_BPW.device
        self.text_blocks = cast("list[TextBlock]", list(model.text.blocks))
        self.decoder_blocks = cast("list[DecoderBlock]", list(model.decoder.blocks))
        self.images = self.texts = len(image_BPW)
        self.length = 0
        self.image_keys_values: list[KeysValues] = [block.cross.keys_values(image_BPW) for block in self.decoder_blocks]
        self.text_keys_values: dict[nn.Module, KeysValues] = {}

    def feed(self, token_N: Tensor) -> Tensor:
        x_NW = self.text.token_embedding(token_N.to(self.device)) + self.text.positional_embedding[self.length]
        for block in self.text_blocks:
            x_NW = self._self_attention(block, x_NW)
        for layer, image in zip(self.decoder_blocks, self.image_keys_values, strict=True):
            x_NW = self._cross_attention(layer.cross, self._self_attention(layer.text, x_NW), image)
        self.length += 1
        return self.decoder.scores(x_NW)

    def select(self, row_M: Tensor) -> None:
        row_M = row_M.to(self.device)
        self.text_keys_values = {
            block: (keys[row_M], values[row_M]) for block, (keys, values) in self.text_keys_values.items()
        }
        image_M = row_M // (self.texts // self.images)
        self.texts = len(row_M)
        each = torch.arange(self.images, device=self.device).repeat_interleave(self.texts // self.images)
        if not torch.equal(image_M, each):
            self.image_keys_values = [(keys[image_M], values[image_M]) for keys, values in self.image_keys_values]
            self.images = self.texts

    def _self_attention(self, block: TextBlock, x_NW: Tensor) -> Tensor:
        """Returns the attention block's output for one further token and caches its keys and values."""
        parts = block.attn.qkv(block.norm1(x_NW))[:, None].chunk(3, -1)
        q_NH1K, keys, values = (split_heads(part, block.attn.heads) for part in parts)
        if block in self.text_keys_values:
            keys, values = (
                torch.cat(pair, 2) for pair in zip(self.text_keys_values[block], (keys, values), strict=True)
            )
        self.text_keys_values[block] = keys, values
        mixed_NW = join_heads(F.scaled_dot_product_attention(q_NH1K, keys, values)).squeeze(1)
        return self._add(block, x_NW, mixed_NW)

    def _cross_attention(self, block: CrossBlock, x_NW: Tensor, image: KeysValues) -> Tensor:
        mixed_NW = block.attn(block.norm1(x_NW).unflatten(0, (self.images, -1)), *image).flatten(0, 1)
        return self._add(block, x_NW, mixed_NW)

    def _add(self, block: TextBlock | CrossBlock, x_NW: Tensor, mixed_NW: Tensor) -> Tensor:
        x_NW = x_NW + block.attn.proj(mixed_NW)
        out_NW: Tensor = x_NW + block.mlp(block.norm2(x_NW))
        return out_NW
