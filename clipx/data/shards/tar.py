"""Scans the headers of a tar: the offsets and sizes of its samples' members, and damage of the archive."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from clipx.data.shards.remote import open_sequential
from clipx.data.source import MAX_BYTES, MAX_TEXT

COLUMNS = {"jpg": 0, "jpeg": 0, "png": 0, "webp": 0, "txt": 1, "json": 2, "cls": 3}
"""{extension: column} of the members that are read. All others are ignored."""

IMAGE, TXT, JSON, CLS = range(4)
_MISSING = (0, -1)
_MAX_MEMBER_BYTES = (MAX_BYTES, MAX_TEXT, MAX_TEXT, MAX_TEXT)  # limit of a member in bytes, by column
_MAX_HEADER_BYTES = 1 << 20  # limit of a header in bytes, including long names


@dataclass(frozen=True, slots=True)
class TarSample:
    """A sample of a tar."""

    name: str
    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    """{extension: (offset, size)}."""

    def row(self) -> list[tuple[int, int]]:
        """Returns (offset, size) of each column of the index table."""
        row = [_MISSING] * 4
        for extension, span in self.members.items():
            row[COLUMNS[extension]] = span
        return row

    def fault(self, captions: Sequence[int]) -> str | None:
        """Returns the reason why the sample is unusable, or None. `captions`: the columns that hold its captions."""
        row = self.row()
        for columns, what in (((IMAGE,), "image"), (captions, "label" if captions == (CLS,) else "caption")):
            if all(row[column][1] <= 0 for column in columns):
                return f"{what} is missing or empty"
        for (_, size), what, limit in zip(row, ("image", "txt", "json", "cls"), _MAX_MEMBER_BYTES, strict=True):
            if size > limit:
                return f"{what} is larger than {limit >> 20} MiB"
        return None


def scan(url: str, size: int, retry_s: float) -> tuple[list[TarSample], str | None]:
    """Returns the samples of a tar in the order of their first members, and a description of its damage or None.

    Members of a sample need not be adjacent: in a tar of an unsorted folder they are not.
    """
    samples: list[TarSample] = []
    newest: dict[str, TarSample] = {}
    try:
        with open_sequential(url, size, retry_s) as file, _open_tar(file) as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # tarfile would store every header
                if member.size < 0 or member.offset_data + member.size > size:
                    return samples, f"is cut off inside {member.name}"
                folder, slash, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                name, extension = f"{folder}{slash}{stem}", extension.lower()
                if extension not in COLUMNS or not member.isreg() or member.issparse():
                    continue
                if name not in newest or extension in newest[name].members:  # repeated: a new sample of the same name
                    newest[name] = TarSample(name)
                    samples.append(newest[name])
                newest[name].members[extension] = (member.offset_data, member.size)
            return samples, _end_damage(file, tar.offset)
    except (tarfile.TarError, RecursionError) as error:  # tarfile recurses for each extension header of a member
        if samples:
            return samples, f"is cut off or damaged after {samples[-1].name} ({error})"
        return samples, f"cannot be read as an uncompressed tar: {error}"


def _open_tar(file: IO[bytes]) -> tarfile.TarFile:
    headers: Any = _Headers(file)
    return tarfile.open(fileobj=headers, mode="r:")  # "r:" disables decompression, hence no gzip bomb


class _Headers:
    """File object for tarfile that limits the size of a read.

    tarfile itself reads a long name or a pax header of any length into memory.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.tell, self.seek = file, file.tell, file.seek

    def read(self, size: int) -> bytes:
        if size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"header of {size:,} bytes")
        return self._file.read(size)


def _end_damage(file: IO[bytes], offset: int) -> str | None:
    """Returns a description of the damage at the end of the archive, or None.

    tarfile treats a damaged or truncated header as the end of the archive. A valid end has zeros up to the end of the
    file.
    """
    file.seek(offset)
    end = file.read(1 << 16)
    if not end:
        return "ends without the end-of-archive mark, so it may be cut off"
    if end[:512].strip(b"\0"):
        return f"has a damaged or cut header at byte {offset:,}"
    if end.strip(b"\0"):
        return "has data after its end-of-archive mark, as tars joined by cat have: create it again"
    return None
