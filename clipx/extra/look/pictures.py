"""Pictures and bars of the page: samples as the model sees them, whole images, captions with tokens, histograms."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice

import numpy as np
from PIL import Image

from clipx.data.loader import TrainBatches
from clipx.data.source import BadRecord, BadSample, prefetch_samples
from clipx.errors import DataError
from clipx.escape import escaped
from clipx.extra.look.duplicates import Numbers, preview
from clipx.report.page import paragraph, picture, text

_MOST_TOKENS = 400  # shown of a caption
_JOINERS = "\u200c\u200d"  # parts of the writing of Persian, Indian scripts and emoji


def user_text(value: str) -> str:
    """Returns a caption for HTML: as `text`, with the joiners that several scripts are written with."""
    return html.escape(escaped(value, _JOINERS))


class Pictures:
    """HTML of samples of the training stream. Captions open to their tokens and the name of the sample."""

    def __init__(self, stream: TrainBatches, max_pixels: int) -> None:
        self.stream, self.source, self.max_pixels = stream, stream.source, max_pixels
        self.tokenizer = stream.texts.tokenizer
        self.special = frozenset(self.tokenizer.encode(""))
        self._rows = stream.images.allocate(1)

    def sheet(self, positions: range) -> str:
        """Returns the samples at positions of the stream as training reads them, and an error that ended them."""
        tiles, end = list[str](), ""
        wanted = [self.stream.order(position) for position in positions]
        prefetch_samples(self.source, wanted)
        try:
            for position, index in zip(positions, wanted, strict=True):
                tiles.append(self._drawn(position, index))
        except DataError as error:
            end = paragraph(f"The samples end here: {error}")
        return f'<div class="samples">\n{"".join(tiles)}</div>{end}'

    def draws(self, position: int, index: int) -> str:
        """Returns a sample as a whole, and what consecutive epochs read of it."""
        name = self.source.key(index).replace(":", "/").rpartition("/")[2]
        number = len(self.source.read(index).captions)
        tiles = [self.thumbnails([index], captioned=False)]
        tiles += [self._drawn(position + epoch * self.stream.order.samples, index) for epoch in range(6)]
        title = f"<h3>{text(name)}, {number} caption{'s' * (number != 1)}</h3>"
        return f'{title}<div class="samples draws">\n{"".join(tiles)}</div>'

    def thumbnails(self, indices: Sequence[int], captioned: bool = True) -> str:
        """Returns whole images in small with their first captions, without those that cannot be read any more."""
        prefetch_samples(self.source, indices)
        tiles = list[str]()
        for index in indices:
            with suppress(BadSample):
                sample = self.source.read(index)
                image, (width, height) = preview(sample.image, self.max_pixels)
                caption = self.caption(sample.captions[0], index) if captioned else ""
                tiles.append(_tile(image, 112, f"{width:,} x {height:,}", caption))
        return "".join(tiles)

    def caption(self, words: str, index: int) -> str:
        """Returns a caption of a sample that opens to its tokens."""
        ids, context = self.tokenizer.encode(words), self.tokenizer.context_length
        row = self.tokenizer([words])[0].tolist()
        first = next((place for place, (a, b) in enumerate(zip(row, ids, strict=False)) if a != b), context)
        cut = range(first, first + len(ids) - context)  # what the truncated row lacks begins at its first difference
        tags = ("em" if token in self.special else "s" if place in cut else "span" for place, token in enumerate(ids))
        pieces = (f"<{tag}>{user_text(self.tokenizer.piece(i))}</{tag}>" for tag, i in zip(tags, ids, strict=True))
        more = f" and {len(ids) - _MOST_TOKENS:,} more" if len(ids) > _MOST_TOKENS else ""
        lost = f", <b>{len(cut):,} cut off</b>" if cut else ""
        return (
            f"<details><summary><bdi>{user_text(words)}</bdi><small>{len(ids):,} tokens{lost}</small></summary>"
            f'<p class="tokens">{" ".join(islice(pieces, _MOST_TOKENS))}{more}</p>'
            f"<small>{text(self.source.key(index))}</small></details>"
        )

    def _drawn(self, position: int, index: int) -> str:
        """Returns a sample as training reads it at a position of the stream. Raises DataError."""
        bad: list[BadRecord] = []
        index, captions, _ = self.stream.sample(position, index, self._rows, 0, bad)
        caption = self.caption(self.stream.texts.shown(captions[0], self.stream.seed, position), index)
        remark = f"in place of {bad[0].key}: {bad[0].reason}" if bad else ""
        return _tile(Image.fromarray(self._rows[0][0].numpy()), 320, remark, caption)


def _tile(image: Image.Image, side: int, remark: str, caption: str) -> str:
    """Returns a picture of at most `side` pixels, as a data URL, with a remark and a caption."""
    # The style enlarges small pictures, PNGs, without interpolation.
    kind, options = ("PNG", {"optimize": True}) if max(image.size) <= 96 else ("JPEG", {"quality": 88})
    source = f"data:image/{kind.lower()};base64,{picture(image, side, kind, **options)}"
    remark = f"<small>{text(remark)}</small>" if remark else ""
    return f'<figure><img src="{source}" alt="" loading="lazy">{remark}{caption}</figure>\n'


def percent(count: int, total: int) -> str:
    """Returns a share as `0.6%`; `–` of nothing."""
    share = 100 * count / max(1, total)
    shown = f"{share:.0f}%" if share >= 10 else "< 0.01%" if 0 < share < 0.01 else f"{share:.2g}%"
    return shown if total else "–"


def bars(title: str, rows: Iterable[tuple[str, int]], total: int, over: int = 0) -> str:
    """Returns counts by name, which is HTML, as bars with their shares of `total`. Those of 0 are left out.

    The last `over` rows are in the colour of warnings.
    """
    counted = [*rows]
    most, first = max((count for _, count in counted), default=0), len(counted) - over
    lines = "".join(
        f'<span>{name}</span><div{" class=over" * (place >= first)} style="width:{100 * count / most:.1f}%"></div>'
        f"<span>{count:,}</span><span>{percent(count, total)}</span>\n"
        for place, (name, count) in enumerate(counted)
        if count
    )
    return f'<figure><figcaption>{text(title)}</figcaption><div class="bars">\n{lines}</div></figure>' if most else ""


def histogram(title: str, values: Numbers, edge: int | None = None) -> str:
    """Returns bins of numbers as bars. Those above `edge` are in the colour of warnings."""
    found = bins(values, edge)
    ends = ("" if high == low else " and more" if high is None else f" to {high:,}" for low, high, _ in found)
    rows = ((f"{low:,}{end}", count) for (low, _, count), end in zip(found, ends, strict=True))
    return bars(title, rows, len(values), sum(edge is not None and low > edge for low, _, _ in found))


def bins(values: Numbers, edge: int | None = None) -> list[tuple[int, int | None, int]]:
    """Returns (first value, last value, count) of at most 16 bins of whole numbers, of equal round width.

    The last bin has the largest 1% if they are far; its last value is None. `edge`: the last value of a bin, if it is
    in the range of the bins.
    """
    low, top = int(values.min()), int(np.quantile(values, 0.99, method="higher"))
    least = max(1, (top - low + 1) / 14)
    scale = 10 ** int(math.log10(least))
    step = next(number * scale for number in (1, 2, 5, 10) if number * scale >= least)
    start = low // step * step if edge is None else low - (low - edge - 1) % step
    last = (top - start) // step + 1  # number of the bin without an end
    counts = np.bincount(np.minimum((values - start) // step, last)).tolist()
    lows = [start + step * place for place in range(len(counts))]
    return [(max(0, n), None if i == last else n + step - 1, counts[i]) for i, n in enumerate(lows)]
