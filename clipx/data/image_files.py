"""Files of images: their formats, by first bytes or name, the files of a folder, and sources of many of them."""

from __future__ import annotations

import json
import os
import string
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from clipx.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from clipx.data.source import BadRecord

IMAGES = (".jpg", ".png", ".jpeg", ".webp")
"""Endings of names of images. Of several images of a sample the first in this order is read, as in open_clip."""

READ = "JPEG, PNG or WebP"
ENDING_UNREAD = f"file, not {READ}"

OTHER_ENDINGS = frozenset(
    """.svg .svgz .gif .tif .tiff .bmp .avif .heic .heif .ico .jp2 .jxl .psd .eps .pdf .htm .html .mp4 .webm
    .mov""".split()
)
"""Endings of names of images, pages and videos that clipx does not read."""

_MAGIC = (  # (offset, bytes, format)
    (0, b"GIF8", "GIF"),
    *((0, mark, "TIFF") for mark in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    (0, b"BM", "BMP"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"8BPS", "Photoshop"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"\xff\x0a", "JPEG XL"),
    (4, b"JXL ", "JPEG XL"),
    (4, b"jP  ", "JPEG 2000"),
    *((4, b"ftyp" + brand, "AVIF") for brand in (b"avif", b"avis")),
    *((4, b"ftyp" + brand, "HEIF") for brand in (b"hei", b"hev", b"mif1", b"msf1")),
    (4, b"ftyp", "a video (MP4)"),
    (0, b"\x1a\x45\xdf\xa3", "a video (WebM)"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"PK\3\4", "ZIP"),
)
_DAMAGED = ((0, b"\xff\xd8", "JPEG"), (0, b"\x89PNG", "PNG"), (8, b"WEBP", "WebP"))
NPY = b"\x93NUMPY"  # first bytes of an .npy file

_TEXT = frozenset(string.printable.encode())
_NPY_READ = "image is stored features (.npy), not pixels: set model.image.features"
_HEAD = 1024  # bytes that are inspected


def reason_unread(encoded: bytes) -> str:
    """Returns the reason why the bytes are no image that can be opened, with the name of their format."""
    head = encoded[:_HEAD]
    if not head.strip(b"\0"):
        return "image is empty" if not head else "image consists of zero bytes"
    if head.startswith(NPY):
        return _NPY_READ
    for offset, mark, name in _DAMAGED:
        if head.startswith(mark, offset):
            return f"image is {name} with a damaged header"
    found = next((name for offset, mark, name in _MAGIC if head.startswith(mark, offset)), None) or _text_format(head)
    if found is None:
        return f"image is not {READ}, or its header is damaged"
    return f"image is {found}, not {READ}"


def _text_format(head: bytes) -> str | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if b"<svg" in text and text.startswith((b"<svg", b"<?xml", b"<!--", b"<!doctype")):
        return "SVG"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "HTML"
    if text.startswith(b"<?xml"):
        return "XML"
    return "text" if _TEXT.issuperset(head) else None


def ending_unread(path: str) -> str | None:
    """Returns the reason why a path with this ending is no image that can be read, or None."""
    ending = path[max(0, path.rfind(".")) :].lower()
    return f"image is a {ending} {ENDING_UNREAD}" if ending in OTHER_ENDINGS else None


_HIDDEN = ("__MACOSX", "@eaDir")  # copies of attributes and previews that macOS and Synology put beside the files


def is_hidden(path: str) -> bool:
    """Returns whether the last part of a path is hidden, such as .DS_Store and ._photo.jpg of macOS."""
    name = path.rpartition("/")[2]
    return name.startswith(".") or name in _HIDDEN


def walk(folder: str, key: str) -> Iterator[str]:
    """Yields the files in a folder and in those below, links among them: first the folders that are in it, then linked
    ones. `key`: name of the option, for error messages.

    Each folder is entered once, and none above `folder`: links may form a cycle. Hidden folders are not entered, hidden
    files are yielded. Raises DataError.
    """

    def fail(error: OSError) -> None:  # os.walk would leave out a folder that cannot be read
        raise DataError(f"{key}: the folder {error.filename} cannot be read ({error.strerror}): allow it, or remove it")

    place = Path(folder)
    seen = {str(above) for path in (place.absolute(), place.resolve()) for above in path.parents}
    waiting = [folder]
    for start in waiting:
        for at, folders, files in os.walk(start, onerror=fail):
            real = os.path.realpath(at)
            below = [] if real in seen else sorted(name for name in folders if not is_hidden(name))
            links = {name for name in below if os.path.islink(os.path.join(at, name))}  # noqa: PTH114,PTH118
            waiting += [os.path.join(at, name) for name in below if name in links]  # noqa: PTH118
            folders[:] = [name for name in below if name not in links]
            if real not in seen:
                yield from (os.path.join(at, name) for name in sorted(files))  # noqa: PTH118
            seen.add(real)


T = TypeVar("T")


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Packed(Generic[T]):
    """An immutable list of JSON values in memory that forked processes share, as they count no references in it.

    Each value takes the bytes of its JSON text and 8 more.
    """

    encoded: bytes  # JSON texts of all values, concatenated
    bounds: NDArray[np.int64]  # [values + 1]: value i is encoded[bounds[i]:bounds[i + 1]]

    @classmethod
    def of(cls, values: Iterable[T]) -> Packed[T]:
        """Packs values that JSON can represent."""
        import numpy as np

        encoded, ends = bytearray(), array("q", [0])
        text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
        for value in values:
            encoded += text(value).encode("utf-8", "surrogatepass")
            ends.append(len(encoded))
        return cls(bytes(encoded), np.array(ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[T]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> T:
        i = range(len(self))[index]
        text = self.encoded[self.bounds[i] : self.bounds[i + 1]].decode("utf-8", "surrogatepass")
        value: T = json.loads(text)
        return value


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Base class of sources of image files.

    Small nominal shards make the order random over all files, which is free for separate files.
    """

    folder: str
    images: Packed[str]  # paths in the folder
    bad: Sequence[BadRecord]
    fingerprint: str

    @property
    def sizes(self) -> Sequence[int]:
        """Nominal shards of 100 images each."""
        full, rest = divmod(len(self.images), 100)
        return [100] * full + [rest] * (rest > 0)

    def key(self, index: int) -> str:
        return os.path.join(self.folder, self.images[index])  # noqa: PTH118
