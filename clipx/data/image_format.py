"""Names the format of a file that is not an image clipx reads, by its first bytes or the ending of its name."""

from __future__ import annotations

import string

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
NPY = b"\x93NUMPY"
"""First bytes of an .npy file."""

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
