"""The samples of a tar, found by its headers: their members' places, and what is wrong with it."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from clipx.data.shards.remote import open_sequential
from clipx.data.source import MAX_BYTES, MAX_TEXT

COLUMNS = {"jpg": 0, "jpeg": 0, "png": 0, "webp": 0, "txt": 1, "json": 2, "cls": 3}  # the only members ever read
IMAGE, TXT, JSON, CLS = range(4)
_MISSING = (0, -1)
_MAX_MEMBER_BYTES = (MAX_BYTES, MAX_TEXT, MAX_TEXT, MAX_TEXT)  # bytes of a member, by column
_MAX_HEADER_BYTES = 1 << 20  # bytes that a header, its long names included, may have


@dataclass(frozen=True, slots=True)
class TarSample:
    """A sample of a tar: (offset, size) of each member by its ending."""

    name: str
    members: dict[str, tuple[int, int]] = field(default_factory=dict)

    def row(self) -> list[tuple[int, int]]:
        row = [_MISSING] * 4
        for ending, place in self.members.items():
            row[COLUMNS[ending]] = place
        return row

    def fault(self, captions: Sequence[int]) -> str | None:
        row = self.row()
        for columns, what in (((IMAGE,), "image"), (captions, "label" if captions == (CLS,) else "caption")):
            if all(row[column][1] <= 0 for column in columns):
                return f"{what} is missing or empty"
        for (_, size), ending, limit in zip(row, ("image", "txt", "json", "cls"), _MAX_MEMBER_BYTES, strict=True):
            if size > limit:
                return f"{ending} is larger than {limit >> 20} MiB"
        return None


def scan(url: str, size: int, retry_s: float) -> tuple[list[TarSample], str | None]:
    """The samples of a tar in the order of their first members, and what is wrong with the tar.

    Members of a sample need not be neighbours, as they are not in a tar of an unsorted folder.
    """
    samples: list[TarSample] = []
    newest: dict[str, TarSample] = {}
    try:
        with open_sequential(url, size, retry_s) as file, _open_tar(file) as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every header
                if member.size < 0 or member.offset_data + member.size > size:
                    return samples, f"is cut off inside {member.name}"
                folder, slash, base = member.name.rpartition("/")
                stem, _, ending = base.partition(".")
                name, ending = f"{folder}{slash}{stem}", ending.lower()
                if ending not in COLUMNS or not member.isreg() or member.issparse():
                    continue
                if name not in newest or ending in newest[name].members:  # or another sample of the same name
                    newest[name] = TarSample(name)
                    samples.append(newest[name])
                newest[name].members[ending] = (member.offset_data, member.size)
            return samples, _end_damage(file, tar.offset)
    except (tarfile.TarError, RecursionError) as error:  # tarfile calls itself for each header before a member's own
        if samples:
            return samples, f"is cut off or damaged after {samples[-1].name} ({error})"
        return samples, f"cannot be read as an uncompressed tar: {error}"


def _open_tar(file: IO[bytes]) -> tarfile.TarFile:
    headers: Any = _Headers(file)
    return tarfile.open(fileobj=headers, mode="r:")  # r: no gzip bomb


class _Headers:
    """A tar as tarfile reads it, which takes a long name or a pax header of any length into memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.tell, self.seek = file, file.tell, file.seek

    def read(self, size: int) -> bytes:
        if size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self._file.read(size)


def _end_damage(file: IO[bytes], offset: int) -> str | None:
    """tarfile takes a damaged or cut header for the end of the archive; a real end is zeros to the end of the file."""
    file.seek(offset)
    end = file.read(1 << 16)
    if not end:
        return "ends without the end-of-archive mark, so it may be cut off"
    if end[:512].strip(b"\0"):
        return f"has a damaged or cut header at byte {offset:,}"
    if end.strip(b"\0"):
        return "goes on after its end-of-archive mark, as tars joined by cat do: pack it anew"
    return None
