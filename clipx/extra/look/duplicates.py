"""Signatures of pictures, and the groups of samples whose pictures are equal or nearly equal.

The signature of a picture is a difference hash of 64 bits (dHash: whether each of 8 x 8 areas is brighter than its
neighbour to the right) and the mean colours of 8 x 8 areas. The hash finds candidates; the colours reject pictures of
different things on similar backgrounds. Measured on drawings of 48 pixels (data=shapes): of 9,733 pairs with at most 4
differing bits the colours leave 2; of 900 resized or recompressed copies of pictures like photographs they reject none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clipx.data.jpeg import decode_jpeg, plain_jpeg
from clipx.data.transform import decode

_SIDE = 8
SIGNATURE_FIELDS = (("digest", "u8", 2), ("hash", "u8"), ("colours", "u1", (_SIDE, _SIDE, 3)))
"""The first 128 bits of the SHA-256 of the encoded image, difference hash, mean colours."""

NEAR_BITS = 4
"""Largest number of differing bits in the hashes of near duplicates."""

_MOST = 4096  # samples that one is compared with in each band, which bounds the time
_BLOCK = 4096  # pairs that are compared together, which bounds the memory
_BITS = np.array([number.bit_count() for number in range(1 << 16)], dtype=np.uint8)

Numbers = NDArray[np.int64]


def preview(encoded: bytes, max_pixels: int) -> tuple[Image.Image, tuple[int, int]]:
    """Returns (upright picture, possibly shrunk, of at least 128 pixels a side; its full width and height).

    Raises BadSample.
    """
    wh = plain_jpeg(encoded, max_pixels)
    if wh is None:
        image = decode(encoded, max_pixels)
        return image, image.size
    return Image.fromarray(decode_jpeg(encoded, min_width=128, min_height=128, min_factor=2)), wh


def signature(encoded: bytes, image: Image.Image) -> tuple[object, ...]:
    """Returns the values of SIGNATURE_FIELDS. `image`: the preview of the encoded one."""
    grey = np.asarray(image.convert("L").resize((_SIDE + 1, _SIDE), Image.Resampling.BOX), dtype=np.int16)
    bits = np.packbits(grey[:, :-1] > grey[:, 1:] + 3)  # noise of compression in plain areas, below 3 of 255, sets none
    words = np.frombuffer(hashlib.sha256(encoded).digest()[:16] + bits.tobytes(), ">u8").tolist()
    return words[:2], words[2], np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX), dtype=np.uint8)


def exact_duplicates(digests: NDArray[np.uint64]) -> Numbers:
    """Returns for each row of [N, 2] digests the number of the first equal row; the first one has its number."""
    _, first, inverse = np.unique(digests, axis=0, return_index=True, return_inverse=True)
    return np.asarray(first[inverse.reshape(-1)])


def near_duplicates(hashes: NDArray[np.uint64], areas: NDArray[np.uint8], most_bits: int = NEAR_BITS) -> Numbers:
    """Returns for each picture the number of the first one of its group; the first one has its number.

    Pictures are near if at most `most_bits` bits of their `hashes`_N differ, and the mean colours of their `areas`_N883
    by a quarter of the contrast: the standard deviation of the colours, of the picture with more of it, at least 8 of
    255. A group is connected by near pictures. Of hashes with at most k differing bits, one of k + 1
    bands of bits is equal: only pictures with an equal band are compared, each with at most 4,096 others. Memory: about
    50 bytes for each picture in addition to the signatures.
    """
    first, flat = np.arange(len(hashes)), areas.reshape(len(areas), _SIDE * _SIDE * 3)
    contrast = np.sqrt(areas.var(axis=(1, 2), dtype=np.float32).mean(axis=1))
    limits = 0.25 * np.maximum(contrast, np.float32(8))
    for one, other in _candidates(hashes, most_bits + 1):
        differing = _BITS[(hashes[one] ^ hashes[other]).view(np.uint16).reshape(-1, 4)].sum(axis=1, dtype=np.int64)
        close = (differing <= most_bits) & (first[one] != first[other])
        one, other = one[close], other[close]
        apart = np.sqrt(((flat[other].astype(np.float32) - flat[one]) ** 2).mean(axis=1))
        near = apart <= np.maximum(limits[one], limits[other])
        _join(first, one[near], other[near])
    return first


def groups_of(first: Numbers) -> list[list[int]]:
    """Returns the groups with at least two members, the largest first. `first`: the first member of each group."""
    members: dict[int, list[int]] = {}
    for number in np.flatnonzero(np.bincount(first, minlength=len(first))[first] > 1).tolist():
        members.setdefault(int(first[number]), []).append(number)
    return sorted(members.values(), key=lambda group: (-len(group), group[0]))


def _candidates(hashes: NDArray[np.uint64], bands: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Yields pairs of pictures with an equal band of bits: (numbers of the ones, numbers of the others)."""
    for low, high in pairwise(round(64 * band / bands) for band in range(bands + 1)):
        band = (hashes >> np.uint64(low)) & np.uint64((1 << (high - low)) - 1)
        ordered = np.lexsort((hashes, band))
        ends = np.searchsorted(band[ordered], band[ordered], side="right")  # of the pictures with the same band
        for start in range(0, len(ordered), _BLOCK):
            at, step = np.arange(start, min(start + _BLOCK, len(ordered))), 1
            while step <= _MOST and len(at := at[at + step < ends[at]]):
                yield ordered[at], ordered[at + step]
                step += 1


def _join(first: Numbers, one: Numbers, other: Numbers) -> None:
    """Joins the groups of pairs, in place: all members get the first number of their group."""
    while len(one):
        np.minimum.at(first, np.maximum(first[one], first[other]), np.minimum(first[one], first[other]))
        while (deeper := first[first]).tobytes() != first.tobytes():
            first[:] = deeper
        apart = first[one] != first[other]
        one, other = one[apart], other[apart]
