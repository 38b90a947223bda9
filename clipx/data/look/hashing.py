"""Signatures of pictures, and the groups of samples whose pictures are equal or nearly equal.

The signature of a picture is a difference hash of 64 bits (dHash: whether each of 8 x 8 areas is brighter than its
neighbour to the right) and the mean colours of 8 x 8 areas. The hash finds candidates; the colours reject pictures of
different things on similar backgrounds, whose hashes are similar. Measured on drawings of 48 pixels (data=shapes): of
9,733 pairs with at most 4 differing bits the colours leave 2; of 900 resized or recompressed copies of pictures like
photographs they reject none.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from clipx.data.source import BadSample
from clipx.data.transform import decode, plain_jpeg

SIDE = 8
MARGIN = 3
"""Difference in brightness, of 255, above which a bit is set: noise of compression in plain areas sets none."""

MOST_COLOUR = 0.25
"""Largest root mean square difference of the mean colours of near duplicates, as a multiple of the contrast: the
standard deviation of the colours of the areas, of the picture with more of it."""

_LEAST_CONTRAST = 8.0  # of 255: pictures of one colour have none

_PREVIEW = 128  # pixels of each side that a shrunk JPEG has at least
_MOST_COMPARED = 4096  # samples with which one is compared in each band: bounds the time
_POPCOUNT = np.array([number.bit_count() for number in range(1 << 16)], dtype=np.uint8)

Numbers = NDArray[np.int64]


def preview(encoded: bytes, max_pixels: int) -> tuple[Image.Image, tuple[int, int]]:
    """Returns (upright picture, possibly shrunk, of at least 128 pixels a side; its full width and height).

    Raises BadSample.
    """
    wh = plain_jpeg(encoded, max_pixels)
    if wh is None:
        image = decode(encoded, max_pixels)
        return image, image.size
    try:
        pixels = simplejpeg.decode_jpeg(encoded, min_width=_PREVIEW, min_height=_PREVIEW, min_factor=2)
    except ValueError as error:
        raise BadSample(f"image cannot be decoded: {' '.join(str(error).split())[:120]}") from None
    return Image.fromarray(pixels), wh


def difference_hash(image: Image.Image) -> int:
    """Returns the 64 bits of the difference hash."""
    grey = np.asarray(image.convert("L").resize((SIDE + 1, SIDE), Image.Resampling.BOX), dtype=np.int16)
    bits = grey[:, :-1] > grey[:, 1:] + MARGIN
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def colours(image: Image.Image) -> NDArray[np.uint8]:
    """Returns the mean colours of 8 x 8 areas, [8, 8, 3]."""
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.uint8)


def contrast(areas: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns the standard deviation of the mean colours of each picture, [N, 8, 8, 3], at least 8 of 255."""
    spread: NDArray[np.float32] = np.sqrt(areas.var(axis=(1, 2), dtype=np.float32).mean(axis=1))
    return np.maximum(spread, np.float32(_LEAST_CONTRAST))


def exact_duplicates(digests: NDArray[np.uint64]) -> Numbers:
    """Returns for each row of [N, 2] digests the number of the first equal row; the first one has its number."""
    _, first, inverse = np.unique(digests, axis=0, return_index=True, return_inverse=True)
    found: Numbers = first[inverse.reshape(-1)]
    return found


def near_duplicates(hashes: NDArray[np.uint64], areas: NDArray[np.uint8], most_bits: int) -> Numbers:
    """Returns for each picture the number of the first one of its group; the first one has its number.

    Pictures are near if at most `most_bits` bits of their `hashes`_N differ, and the mean colours of their `areas`_N883
    by at most MOST_COLOUR; a group is connected by near pictures. Of hashes with at most k differing bits, one of k + 1
    bands of bits is equal: only pictures with an equal band are compared, each with at most 4,096 others. Memory: about
    30 bytes for each picture in addition to the signatures.
    """
    parent = np.arange(len(hashes))
    flat, limits = areas.reshape(len(areas), SIDE * SIDE * 3), MOST_COLOUR * contrast(areas)
    for ordered, bounds in _buckets(hashes, most_bits + 1):
        for start, stop in bounds:
            bucket = ordered[start:stop]
            for place, one in enumerate(bucket[:-1]):
                others = bucket[place + 1 : place + 1 + _MOST_COMPARED]
                close = others[_bits(hashes[others] ^ hashes[one]) <= most_bits]
                if len(close):
                    apart = np.sqrt(((flat[close].astype(np.float32) - flat[one]) ** 2).mean(axis=1))
                    for other in close[apart <= np.maximum(limits[close], limits[one])]:
                        _join(parent, int(one), int(other))
    return np.array([_root(parent, number) for number in range(len(parent))], dtype=np.int64)


def groups_of(first: Numbers) -> list[list[int]]:
    """Returns the groups with at least two members, the largest first. `first`: the first member of each group."""
    members: dict[int, list[int]] = {}
    for number in np.flatnonzero(np.bincount(first, minlength=len(first))[first] > 1):
        members.setdefault(int(first[number]), []).append(int(number))
    return sorted(members.values(), key=lambda group: (-len(group), group[0]))


def _buckets(hashes: NDArray[np.uint64], bands: int) -> Iterator[tuple[Numbers, list[tuple[int, int]]]]:
    """Yields for each band of bits (all numbers, ordered by the band; the ranges of those with an equal band)."""
    edges = [round(64 * band / bands) for band in range(bands + 1)]
    for low, high in pairwise(edges):
        band = (hashes >> np.uint64(low)) & np.uint64((1 << (high - low)) - 1)
        ordered = np.lexsort((hashes, band))
        ends = [0, *(np.flatnonzero(np.diff(band[ordered])) + 1).tolist(), len(ordered)]
        yield ordered, [(start, stop) for start, stop in pairwise(ends) if stop > start + 1]


def _bits(numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the number of set bits of each number."""
    counts: Numbers = _POPCOUNT[numbers.view(np.uint16).reshape(-1, 4)].sum(axis=1, dtype=np.int64)
    return counts


def _root(parent: Numbers, number: int) -> int:
    while parent[number] != number:
        parent[number] = parent[parent[number]]
        number = int(parent[number])
    return number


def _join(parent: Numbers, one: int, other: int) -> None:
    low, high = sorted((_root(parent, one), _root(parent, other)))
    parent[high] = low
