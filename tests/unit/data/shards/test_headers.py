"""Headers of plain files are parsed without tarfile, and give the same members."""

from __future__ import annotations

import tarfile

from clipx.data.shards.tar import _Member

USTAR, GNU, PAX = tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT


def header(name: str, tar: int = USTAR, **values: object) -> bytes:
    info = tarfile.TarInfo(name)
    for key, value in {"size": 12345, **values}.items():
        setattr(info, key, value)
    return info.tobuf(tar, "utf-8", "surrogateescape")[-512:]


def parsed(kind: type[tarfile.TarInfo], block: bytes) -> tuple[str, int, bytes] | str:
    try:
        found = kind.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:  # type: ignore[attr-defined]
        return f"{type(error).__name__}: {error}"
    return found.name, found.size, found.type


def test_a_header_gives_the_member_or_the_error_of_tarfile() -> None:
    for block in (
        header("00/000000001.jpg"),
        header("ein-gr\u00fc\u00dfer.txt"),
        header("n" * 100),
        header("folder/" * 14 + "x" * 60 + ".jpg"),  # with a prefix
        header("large", GNU, size=1 << 36),  # in base 256
        header("folder/", type=tarfile.DIRTYPE, size=0),
        header("old/", type=tarfile.AREGTYPE),
        header("link", type=tarfile.SYMTYPE, linkname="target"),
        header("times", PAX, mtime=12.5),
        header("damaged")[:140] + b"9" + header("damaged")[141:],
        header("no checksum")[:148] + b"\0" * 8 + header("no checksum")[156:],
        header("no size")[:124] + b"x" * 12 + header("no size")[136:],
        header("short")[:400],
        bytes(512),
        b"",
        b"\xff" * 512,
    ):
        assert parsed(_Member, block) == parsed(tarfile.TarInfo, block), block[:20]


def test_any_change_of_a_header_breaks_its_checksum() -> None:
    block = bytearray(header("000000001.jpg"))
    for place in range(0, 345, 7):
        changed = bytes([*block[:place], block[place] ^ 1, *block[place + 1 :]])
        assert parsed(_Member, changed) == parsed(tarfile.TarInfo, changed)
