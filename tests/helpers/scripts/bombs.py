"""Decompression bombs, small on disk and large in memory: `python bombs.py FOLDER` writes each and opens it with clipx.

Prints a JSON object: for each name the message of clipx, the CPU seconds taken (the best of three), and the growth of
memory in MB. The process may use at most 300 MB more than before the first.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import resource
import struct
import sys
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from helpers.payloads import jpeg, member, write_tar
from PIL import Image

from clipx.data.shards.index import JSON, TXT
from clipx.data.shards.shards import _json
from clipx.data.shards.tar import scan
from clipx.data.source import BadSample
from clipx.data.transform import decode, train_transform
from clipx.errors import DataError

GIB = 1 << 30
MAX_PIXELS = 89_000_000  # clipx's default


def header_of(size: int, kind: bytes, name: str = "00.jpg") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def sparse(path: Path, header: bytes, size: int) -> Path:
    """Writes a header, and `size` zero bytes that use no space on disk."""
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size + 1024)
    return path


def recursive(path: Path) -> Path:
    """Writes nested headers, each of which tarfile reads by a recursive call."""
    block = header_of(512, tarfile.GNUTYPE_LONGNAME, "././@LongLink") + b"x".ljust(512, b"\0")
    path.write_bytes(block * 5000)
    return path


def tars(folder: Path) -> dict[str, Path]:
    two_members = header_of(GIB, tarfile.REGTYPE)
    sparse(folder / "member.tar", two_members, GIB)
    with (folder / "member.tar").open("r+b") as file:
        file.seek(512 + GIB)
        file.write(header_of(1, tarfile.REGTYPE, "00.txt") + b"x".ljust(512, b"\0"))
        file.truncate(512 + GIB + 1024 + 1024)
    (folder / "cut.tar").write_bytes(header_of(GIB, tarfile.REGTYPE) + bytes(2048))
    with gzip.open(folder / "gzip.tar", "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    long_json = [member("00.jpg", jpeg()), member("00.json", b" " * (17 << 20))]
    return {
        "a member of 1 GiB": folder / "member.tar",
        "a header of 1 GiB, no member": folder / "cut.tar",
        "a long name of 1 GiB": sparse(folder / "name.tar", header_of(GIB, tarfile.GNUTYPE_LONGNAME), GIB),
        "a pax header of 1 GiB": sparse(folder / "pax.tar", header_of(GIB, tarfile.XHDTYPE), GIB),
        "a global pax header of 1 GiB": sparse(folder / "global.tar", header_of(GIB, tarfile.XGLTYPE), GIB),
        "headers within headers": recursive(folder / "recursive.tar"),
        "a gzip named .tar": folder / "gzip.tar",
        "a large json": write_tar(folder / "json.tar", long_json),
    }


def resized_header(encoded: bytes, side: int) -> bytes:
    """Returns a JPEG whose header claims another size."""
    at = encoded.index(b"\xff\xc0") + 5
    return encoded[:at] + struct.pack(">HH", side, side) + encoded[at + 4 :]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(side: int, *chunks: bytes) -> bytes:
    """Returns a grey 1-bit image of zeros: 400 megapixels take 50 MB, and 50 KB compressed."""
    packer = zlib.compressobj(9)
    row = bytes(1 + (side + 7) // 8)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), *chunks, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    )


def webp(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "WEBP", lossless=True)
    encoded = bytearray(file.getvalue())
    at = encoded.index(b"VP8L") + 9  # 14 bits each for width and height, minus one
    encoded[at : at + 4] = struct.pack("<I", (side - 1) | (side - 1) << 14)
    return bytes(encoded)


def images() -> dict[str, bytes]:
    packer = zlib.compressobj(1)
    zeros = b"".join(packer.compress(bytes(1 << 20)) for _ in range(100)) + packer.flush()
    return {
        "a JPEG of 400 MP": resized_header(jpeg(), 20_000),
        "a JPEG of 100 MP": resized_header(jpeg(), 10_000),
        "a JPEG of 4,295 MP": resized_header(jpeg(), 65_535),
        "a PNG of 400 MP": png(20_000),
        "a PNG of 100 MP": png(10_000),
        "a WebP of 268 MP": webp(16_383),
        "a PNG with 100 MB of text": png(8, chunk(b"zTXt", b"Comment\0\0" + zeros)),
        "a PNG with a colour profile of 100 MB": png(8, chunk(b"iCCP", b"profile\0\0" + zeros)),
    }


def indexed(path: Path) -> str:
    found = scan(str(path), path.stat().st_size, 1.0)
    faults = [sample.fault([TXT, JSON]) for sample in found.samples]
    return "; ".join(filter(None, [found.damage, *faults])) or "taken"


def decoded(encoded: bytes) -> str:
    decode(encoded, MAX_PIXELS)
    return "taken"


def for_training(encoded: bytes) -> str:
    out_SS3 = torch.empty(32, 32, 3, dtype=torch.uint8)
    train_transform(encoded, (0.9, 1.0), MAX_PIXELS, random.Random(0), out_SS3)
    return "taken"


def parsed(encoded: bytes) -> str:
    _json(encoded)
    return "taken"


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def told(look: Callable[[], str]) -> dict[str, object]:
    before, best, said = peak_mb(), 1e9, ""
    for _ in range(3):
        start = time.process_time()
        try:
            said = look()
        except (BadSample, DataError) as error:
            said = str(error)
        best = min(best, time.process_time() - start)
    return {"said": said, "seconds": best, "mb": peak_mb() - before}


def main() -> None:
    looks: dict[str, Callable[[], str]] = {}
    for name, path in tars(Path(sys.argv[1])).items():
        looks[name] = lambda path=path: indexed(path)
    for name, encoded in images().items():
        looks[name] = lambda encoded=encoded: decoded(encoded)
        looks[f"{name}, in training"] = lambda encoded=encoded: for_training(encoded)
    looks["json within json"] = lambda: parsed(b'{"caption":' * 1_000_000)
    looks["a number of a million digits"] = lambda: parsed(b'{"label":' + b"7" * 1_000_000 + b"}")
    for_training(jpeg())
    decoded(jpeg())
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (300 << 20),) * 2)
    print(json.dumps({name: told(look) for name, look in looks.items()}))


if __name__ == "__main__":
    main()
