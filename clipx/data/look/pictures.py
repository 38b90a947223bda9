"""Pictures of the page: samples as the model sees them, and thumbnails of whole images, with captions and tokens."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from clipx.data.loader import TrainBatches
from clipx.data.look.hashing import preview
from clipx.data.source import BadRecord, BadSample, Source, prefetch_samples
from clipx.errors import DataError
from clipx.model.tokenizer import Tokenizer

LOSSLESS = 96
"""Side in pixels up to which pictures are stored as PNG and shown enlarged, without interpolation."""

_MOST_SIDE = 320  # larger pictures are shrunk
_THUMBNAIL = 112
_DRAWS = 6
_MOST_TOKENS = 400  # shown of a caption
_QUALITY = 88


@dataclass(frozen=True, slots=True)
class Token:
    """Token of a caption: its text, whether it is a special token, and whether it is beyond the context."""

    text: str
    special: bool = False
    cut: bool = False


@dataclass(frozen=True, slots=True)
class CaptionTokens:
    """Caption with its first tokens, the number of all tokens, and the number of those that are cut off."""

    caption: str
    tokens: Sequence[Token]
    count: int
    cut: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Picture as a data URL, with the name of its sample and a remark."""

    picture: str
    key: str
    caption: CaptionTokens | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws of one sample: the whole image, its number of captions, and crops with their captions."""

    whole: Tile
    captions: int
    draws: Sequence[Tile]


class Captions:
    """Tokens of captions. `context`: number of tokens that the model reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.context = tokenizer, tokenizer.context_length
        self.special = frozenset(tokenizer.encode(""))

    def __call__(self, caption: str) -> CaptionTokens:
        ids = self.tokenizer.encode(caption)
        cut = self._cut(caption, ids)
        tokens = [
            Token(self.tokenizer.piece(number), number in self.special, place in cut)
            for place, number in enumerate(ids[:_MOST_TOKENS])
        ]
        return CaptionTokens(caption, tokens, len(ids), len(cut))

    def _cut(self, caption: str, ids: Sequence[int]) -> range:
        """Returns the places of the ids that the truncated row lacks, from its first difference."""
        if len(ids) <= self.context:
            return range(0)
        row = self.tokenizer([caption])[0].tolist()
        first = next(place for place, (one, other) in enumerate(zip(ids, [*row, None], strict=False)) if one != other)
        return range(first, first + len(ids) - self.context)


def contact_sheet(stream: TrainBatches, captions: Captions, positions: range) -> tuple[list[Tile], str]:
    """Returns (the samples at positions of the stream as training reads them, an error that ended them or "")."""
    tiles: list[Tile] = []
    (rows,) = stream.view.allocate(1)
    wanted = [stream.order(position) for position in positions]
    prefetch_samples(stream.source, wanted)
    for position, first in zip(positions, wanted, strict=True):
        bad: list[BadRecord] = []
        try:
            drawn = stream.draw(position, first, bad, rows[0])
        except DataError as error:
            return tiles, str(error)
        caption = stream.shown(position, 0, drawn.captions[0])
        remark = f"in place of {bad[0].key}: {bad[0].reason}" if bad else ""
        tiles.append(Tile(_shown(rows[0]), stream.source.key(drawn.index), captions(caption), remark))
    return tiles, ""


def draws(
    stream: TrainBatches, captions: Captions, max_pixels: int, places: Iterable[tuple[int, int]]
) -> Iterator[Draws]:
    """Yields the draws of usable samples at (position, index), as in consecutive epochs."""
    (rows,) = stream.view.allocate(1)
    for position, index in places:
        number = len(stream.source.read(index).captions)
        tiles = []
        for epoch in range(_DRAWS):
            place = position + epoch * stream.order.samples
            caption = stream.shown(place, 0, stream.draw(place, index, [], rows[0]).captions[0])
            tiles.append(Tile(_shown(rows[0]), stream.source.key(index), captions(caption)))
        yield Draws(thumbnail(stream.source, index, max_pixels), number, tiles)


def thumbnail(source: Source, index: int, max_pixels: int) -> Tile:
    """Returns a whole image in small, without a picture if it cannot be read any more."""
    try:
        image, (width, height) = preview(source.read(index).image, max_pixels)
    except BadSample as fault:
        return Tile("", source.key(index), remark=str(fault))
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return Tile(_data_url(image), source.key(index), remark=f"{width} x {height}")


def _shown(row: torch.Tensor) -> str:
    """Returns a row of ImageView, [S, S, 3] uint8, as a data URL."""
    image = Image.fromarray(row.numpy())
    if max(image.size) > _MOST_SIDE:
        image.thumbnail((_MOST_SIDE, _MOST_SIDE))
    return _data_url(image)


def _data_url(image: Image.Image) -> str:
    kind, options = ("PNG", {"optimize": True}) if max(image.size) <= LOSSLESS else ("JPEG", {"quality": _QUALITY})
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
