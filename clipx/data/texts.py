"""Texts of a batch: the drawn captions of its samples in the tokens of the model and of a live teacher."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from clipx.data.inputs import Texts

if TYPE_CHECKING:
    from clipx.data.augment_spec import CaptionMaskSpec
    from clipx.data.source import Sample
    from clipx.data.spec import DataSpec
    from clipx.model.packing import TextPacker
    from clipx.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TeacherTexts:
    """Tokens of a live teacher. None as packer: it takes tokens."""

    tokenizer: Tokenizer
    packer: TextPacker | None = None


@dataclass(frozen=True, slots=True)
class TextReader:
    """Makes the texts of a batch. Pickled to loader processes.

    A sample has `each` captions. A teacher reads the first of them, and as a whole where a mask leaves words out.
    """

    tokenizer: Tokenizer
    each: int = 1
    compared: bool = False  # whether the objective compares captions
    mask: CaptionMaskSpec | None = None  # None: the first tokens of each caption
    packer: TextPacker | None = None  # None: the model takes tokens
    teacher: TeacherTexts | None = None

    def draw(self, sample: Sample, rng: random.Random) -> list[str]:
        """Draws the captions of a sample."""
        return sample.draw_captions(rng, self.each)

    def __call__(self, captions: Sequence[str], positions: Iterable[int], seed: int) -> Texts:
        """Returns the texts of the drawn captions of the samples at these positions, sample by sample."""
        places = itertools.product(positions, range(self.each))
        shown = [self.shown(text, seed, *place) for place, text in zip(places, captions, strict=True)]
        rows, packers = [self.tokenizer(shown)], [self.packer]
        if self.teacher is not None:
            rows.append(self.teacher.tokenizer(captions[:: self.each]))
            packers.append(self.teacher.packer)
        digests = None
        if self.compared:
            digests = caption_digests(rows[0] if self.mask is None else self.tokenizer(captions), self.each)
        return Texts(tuple(rows), self.each, tuple(packers) if any(packers) else (), digests=digests)

    def shown(self, caption: str, seed: int, position: int, number: int = 0) -> str:
        """Returns the words that the text tower reads of the drawn caption `number` of the sample at a position."""
        if self.mask is None:
            return caption
        from clipx.data.caption_mask import masked

        return masked(caption, self.mask, self.tokenizer, f"{seed}/{position}/caption/{number}")


def text_reader_of(
    data: DataSpec, tokenizer: Tokenizer, packer: TextPacker | None = None, compared: bool = False
) -> TextReader:
    """Returns the reader of training texts of data. Loads what the selection of words needs. Raises ConfigError.

    `packer`: of the model. `compared`: whether the objective compares captions.
    """
    return TextReader(tokenizer, data.captions_per_step, compared, used_mask(data.caption_mask), packer)


def text_bytes(data: DataSpec, context_length: int) -> int:
    """Returns the bytes of the tokens of a sample."""
    return torch.int64.itemsize * context_length * data.captions_per_step


def used_mask(mask: CaptionMaskSpec) -> CaptionMaskSpec | None:
    """Returns None for a mask that keeps the first tokens of a caption. Loads what others need. Raises ConfigError."""
    if not mask.active:
        return None
    from clipx.data.caption_mask import check_tagger

    check_tagger(mask)
    return mask


def caption_digests(tokens_bL: Tensor, each: int) -> Tensor:
    """Returns a 64-bit digest of the tokens of each text, [b, each] int64: texts of equal tokens have equal digests."""
    rows = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in tokens_bL.numpy())
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.int64).copy()).view(-1, each)
