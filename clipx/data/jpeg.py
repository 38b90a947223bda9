"""JPEGs: their headers, and the one decoder with the one idea of damage, for training, evaluation and all commands.

libjpeg fills what is missing of a picture with grey, and says so in a warning only. A picture of which data are missing
or wrong is a bad sample; one with stray bytes before its end marker is whole, and is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from clipx.data.source import BadSample

Pixels = NDArray[np.uint8]  # [height, width, 3]

SCAN, ADOBE = 0xDA, 0xEE  # kinds of segments
_APP0, _APP1 = 0xE0, 0xE1
_NEEDED = frozenset([*range(0xC0, 0xD0), 0xDB, 0xDD, SCAN, ADOBE])  # frame, tables, restart interval, colours
_JFIF = b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0"
_END = b"\xff\xd9"
_BARE = frozenset(b"\0\1\xd0\xd1\xd2\xd3\xd4\xd5\xd6\xd7\xff")  # after FF: no segment begins
_MARKER = re.compile(b"\xff[^%s]" % re.escape(bytes(sorted(_BARE))))
_STRAY = re.compile(r"(\d+) extraneous bytes before marker 0xd9$")  # libjpeg shows its first warning only
_FILL = 32  # equal bytes with which a picture may end: the last ones of a plain area. More may stand for lost data.
_TRIES = 4  # libjpeg does not count stray bytes FF, and a run of equal ones is left in part


def decode_jpeg(encoded: bytes, colours: str = "RGB", **shrunk: Any) -> Pixels:
    """Decodes a JPEG whose header has no fault. `colours`, `shrunk`: options of simplejpeg.decode_jpeg. Raises
    BadSample if data of the picture are missing or wrong."""
    decode: Callable[..., Pixels] = partial(simplejpeg.decode_jpeg, encoded, colours, **shrunk)
    try:
        return decode()
    except ValueError as error:
        fault = _fault_without_stray(encoded, colours, _one_line(error))
    if not fault:
        return decode(strict=False)
    raise BadSample(f"image cannot be decoded: {fault.partition(' before marker')[0]}")


def _fault_without_stray(encoded: bytes, colours: str, fault: str) -> str:
    """Returns the fault of a JPEG; "" if it only has stray bytes before its end marker, without which it has none.

    libjpeg decodes zeros in place of lost data as data, and those that remain are stray. So the picture has to be whole
    with only the first of a run of equal bytes before the end marker.
    """
    end = encoded.find(_END, next((stop for kind, _, stop in segments(encoded) if kind == SCAN), 0))
    filled = len(encoded[:end].rstrip(encoded[end - 1 : end])) + _FILL
    for _ in range(_TRIES):
        if (stray := _STRAY.search(fault)) is None:
            return fault
        end = min(filled, end - int(stray[1]))
        fault = fault_of(encoded[:end] + _END, colours)
    return fault


def fault_of(encoded: bytes, colours: str) -> str:
    """Returns the warning or error of libjpeg, "" without one. Half the time of decoding: all data are read."""
    try:
        simplejpeg.decode_jpeg(encoded, colours, min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        return _one_line(error)
    return ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


# ------------------------------------------------------------------------------------------------------- headers


def plain_jpeg(encoded: bytes, max_pixels: int) -> tuple[int, int] | None:
    """Returns (width, height) of a JPEG that only needs decoding; None for an image that needs Pillow."""
    if not encoded.startswith(b"\xff\xd8\xff") or not _upright(encoded):
        return None
    width, height, colours = _header(encoded)
    return (width, height) if colours in ("YCbCr", "Gray", "RGB") and width * height <= max_pixels else None


def _upright(encoded: bytes) -> bool:
    """Returns whether a JPEG header has no segment that can store an orientation; False for a malformed header."""
    at = 2
    for kind, start, end in segments(encoded):
        if start != at:
            return False
        if kind == SCAN:
            return True
        if kind == _APP1 and any(encoded.find(note, at, end) >= 0 for note in (b"Exif\0\0", b"tiff:Orientation")):
            return False
        at = end
    return False


def readable_jpeg(encoded: bytes, size: tuple[int, int]) -> bytes | None:
    """Returns a JPEG of this size with a header that `decode_jpeg` takes: without stray bytes and unknown versions.
    Returns None for a rare coding that only Pillow decodes, such as arithmetic coding and subsampling by 4 x 2."""
    if _header(encoded)[:2] == size:
        return encoded
    parts, at = [encoded[:2]], 2
    for kind, start, at in segments(encoded):
        if kind in _NEEDED:
            parts.append(encoded[start:at])
        elif kind == _APP0 and encoded.startswith(b"JFIF\0", start + 4):
            parts.append(_JFIF)  # libjpeg warns of an unknown version
    plainer = b"".join([*parts, encoded[at:]])
    return plainer if _header(plainer)[:2] == size else None


def _header(encoded: bytes) -> tuple[int, int, str]:
    """Returns (width, height, colours); (0, 0, "") if libjpeg does not read the header."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
    except (ValueError, KeyError):  # KeyError: subsampling that simplejpeg has no name for
        return 0, 0, ""
    return width, height, colours


def segments(encoded: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields (kind, start, end) of the segments up to the first scan. As libjpeg, skips bytes between them."""
    at, last = 2, len(encoded) - 4
    while at <= last:
        kind = encoded[at + 1]
        if encoded[at] != 0xFF or kind in _BARE:
            found = _MARKER.search(encoded, at)
            at = len(encoded) if found is None else found.start()
            continue
        end = at + 2 + (encoded[at + 2] << 8) + encoded[at + 3]
        yield kind, at, end
        if kind == SCAN:
            return
        at = end
