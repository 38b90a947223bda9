"""Text chunks of a PNG file (PNG specification, third edition, section 11.3.3)."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator

from clipx.data.source import BadSample

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MAX_TEXT = 1 << 16  # bytes of an uncompressed text: the longest description of the packages has 1,400


def read_texts(encoded: bytes) -> dict[str, str]:
    """Returns the text of each keyword of the chunks tEXt, zTXt and iTXt: the first one of a keyword.

    Texts longer than 64 KiB and malformed ones are skipped. Checksums are not verified. Raises BadSample if the file is
    not PNG.
    """
    if not encoded.startswith(_SIGNATURE):
        raise BadSample("image is not PNG")
    texts: dict[str, str] = {}
    for kind, content in _chunks(encoded):
        with contextlib.suppress(ValueError, zlib.error):
            keyword, text = _parse(kind, content)
            texts.setdefault(keyword, text)
    return texts


def _chunks(encoded: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields (type, content) of each complete text chunk."""
    start = len(_SIGNATURE)
    while start + 12 <= len(encoded):
        length = int.from_bytes(encoded[start : start + 4], "big")
        kind = encoded[start + 4 : start + 8]
        content = start + 8
        if kind in (b"tEXt", b"zTXt", b"iTXt") and content + length + 4 <= len(encoded):
            yield kind, encoded[content : content + length]
        start = content + length + 4


def _parse(kind: bytes, content: bytes) -> tuple[str, str]:
    """Returns (keyword, text) of a chunk. Raises ValueError and zlib.error."""
    keyword, _, rest = content.partition(b"\0")
    encoding, compressed = "latin-1", kind == b"zTXt"
    if kind == b"iTXt":  # compression flag and method, language, translated keyword, text
        flags, after = rest[:2], rest[2:]
        rest = after.split(b"\0", 2)[2] if after.count(b"\0") >= 2 else b""
        encoding, compressed = "utf-8", flags[:1] == b"\1"
    elif compressed:
        rest = rest[1:]  # method
    text = _decompress(rest) if compressed else rest
    if len(text) > _MAX_TEXT:
        raise ValueError("text is too long")
    return keyword.decode("latin-1"), text.decode(encoding)


def _decompress(content: bytes) -> bytes:
    return zlib.decompressobj().decompress(content, _MAX_TEXT + 1)
