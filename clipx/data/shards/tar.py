"""Indexes a tar by its headers: the offsets and sizes of its samples' members, and damage of the archive."""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Self

from clipx.data.image_files import IMAGES
from clipx.data.shards.index import CLS, IMAGE, JSON, MISSING, TXT, listed_in_files
from clipx.data.source import MAX_BYTES, MAX_TEXT, BadRecord
from clipx.errors import DataError
from clipx.storage.files import errors_as
from clipx.storage.remote import open_sequential

if TYPE_CHECKING:
    from clipx.data.shards.shard import Shard

COLUMNS = {
    **dict.fromkeys((ending[1:] for ending in IMAGES), IMAGE),
    "npy": IMAGE,
    "txt": TXT,
    "json": JSON,
    "cls": CLS,
}
"""{extension: column} of the members that are read, all others are ignored: of a column, the first one that a sample
has. npy: stored features in place of an image."""

_MAX_MEMBER_BYTES = (MAX_BYTES, MAX_TEXT, MAX_TEXT, MAX_TEXT)  # limit of a member in bytes, by column
_BLOCK = 512  # bytes; a caption of this size is in the block after its header, so reading it costs nothing
_MAX_HEADER_BYTES = 1 << 20  # limit of a header in bytes, including long names
_SIZE, _CHECKSUM = re.compile(rb"[0-7]{11}[ \0]"), re.compile(rb"[0-7]{6}\0 ")  # as all usual programs write them


@dataclass(frozen=True, slots=True)
class TarSample:
    """A sample of a tar."""

    name: str
    members: dict[str, tuple[int, int]] = field(default_factory=dict)  # {extension: (offset, size)}

    @property
    def read(self) -> dict[str, tuple[int, int]]:
        """The members that are read: one of each column."""
        if len({COLUMNS[name] for name in self.members}) == len(self.members):
            return self.members
        chosen = {COLUMNS[name]: name for name in reversed(COLUMNS) if name in self.members}
        return {name: span for name, span in self.members.items() if chosen[COLUMNS[name]] == name}

    def row(self) -> list[tuple[int, int]]:
        """Returns (offset, size) of each column of the index table."""
        row = [MISSING] * 4
        for extension, span in self.read.items():
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


@dataclass(slots=True)
class TarContent:
    """Samples of a tar in the order of their first members, and what is wrong with the tar."""

    samples: list[TarSample] = field(default_factory=list)

    damage: str | None = None  # description of the damage after which nothing is read. None if there is none
    dotted: list[str] = field(default_factory=list)
    """Members such as img.v1.jpg that are no images because of the dots in their names."""

    hidden: list[str] = field(default_factory=list)
    """Members such as ._img.jpg that are no images because they are hidden."""


def scan(url: str, size: int, retry_s: float) -> TarContent:
    """Reads the headers of a tar. Raises what reading the file raises; damage of the tar is no exception."""
    found = TarContent()
    with open_sequential(url, size, retry_s) as opened:
        file = _Headers(opened, size)
        try:
            found.damage = _read_members(file, size, found)
        except Exception as error:  # tarfile raises ValueError, OverflowError and others on damaged headers
            if file.failure is not None:
                raise file.failure from None
            reason = " ".join(str(error).split())[:120]
            if found.samples:
                found.damage = f"is cut off or damaged after {found.samples[-1].name} ({reason})"
            else:
                found.damage = f"cannot be read as an uncompressed tar: {reason}"
    images = {sample.name for sample in found.samples if sample.row()[IMAGE] != MISSING}
    found.dotted = [name for name in found.dotted if _key_and_extension(name)[0] not in images]
    return found


def _read_members(file: _Headers, size: int, found: TarContent) -> str | None:
    """Adds the members to `found`. Returns the damage at which the archive ends, or None."""
    newest: dict[str, TarSample] = {}
    stream: Any = file
    # "r:" disables decompression, hence no gzip bomb. The default encoding would depend on the locale.
    with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", tarinfo=_TarMember) as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # tarfile would store every header
            if member.size < 0 or member.offset_data + member.size > size:
                return f"is cut off inside {member.name}"
            if not member.isreg() or member.issparse():
                continue
            name, extension = _key_and_extension(member.name)
            if not name or name[-1] == "/":  # hidden: webdataset and open_clip leave these out, too
                if COLUMNS.get(extension.rpartition(".")[2]) == IMAGE:
                    found.hidden.append(member.name)
                continue
            if extension not in COLUMNS:
                if COLUMNS.get(extension.rpartition(".")[2]) == IMAGE:
                    found.dotted.append(member.name)
                continue
            if name not in newest or extension in newest[name].members:  # repeated: a new sample of the same name
                newest[name] = TarSample(name)
                found.samples.append(newest[name])
            blank = extension == "txt" and 0 < member.size <= _BLOCK and file.is_blank(member.offset_data, member.size)
            newest[name].members[extension] = (member.offset_data, 0 if blank else member.size)
        return _end_damage(file, tar.offset)


def _key_and_extension(member: str) -> tuple[str, str]:
    """Splits a name at the first dot of the file name, as webdataset does. Returns (key of the sample, extension)."""
    folder, slash, base = member.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


class _TarMember(tarfile.TarInfo):
    """Member of a tar. Only name, size and checksum are parsed of the header of a plain file, so that indexing a shard
    takes 0.7 of the time: it is done before the first sample of the shard is read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        size, checksum = buf[124:136], buf[148:156]
        plain = len(buf) == _BLOCK and buf[156:157] == tarfile.REGTYPE and not buf[345]  # no prefix of the name
        plain = plain and bool(_SIZE.fullmatch(size) and _CHECKSUM.fullmatch(checksum))
        # The checksum counts its own eight bytes as spaces.
        if plain and sum(buf) - sum(checksum) + 8 * ord(" ") == int(checksum[:6], 8):
            found = cls(buf[:100].partition(b"\0")[0].decode(encoding, errors))
            found.size = int(size[:11], 8)
            return found
        return super().frombuf(buf, encoding, errors)


class _Headers:
    """File object for tarfile that limits the size of a read and the positions. tarfile itself reads a long name or a
    pax header of any length into memory, and seeks to any position that a header names. `failure` is the error of the
    file that ended the last call."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._size, self.tell = file, size, file.tell
        self.failure: Exception | None = None

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:  # a negative size would read the whole file
            raise tarfile.ReadError(f"header of {size:,} bytes")
        try:
            return self._file.read(size)
        except Exception as error:  # of a remote file system, the exceptions of its library
            self.failure = error
            raise

    def seek(self, offset: int) -> int:
        if not 0 <= offset <= self._size:
            raise tarfile.ReadError("unexpected end of data")
        return self._file.seek(offset)

    def is_blank(self, offset: int, size: int) -> bool:
        """Returns whether a member is white space only."""
        self.seek(offset)
        return not self.read(size).strip()


def _end_damage(file: _Headers, offset: int) -> str | None:
    """Returns a description of the damage at the end of the archive, or None."""
    file.seek(offset)
    end = file.read(1 << 16)
    if not end:
        return "ends without the end-of-archive mark, so it may be cut off"
    if end[:512].strip(b"\0"):
        return f"has a damaged or cut header at byte {offset:,}"
    if end.strip(b"\0"):
        return "has data after its end-of-archive mark, as tars joined by cat have: create it again"
    return None


# ----------------------------------------------------------------------------------------------------------- index


def index_tar(shard: Shard, content: str | None = None, cross_check: bool = True) -> None:
    """Reads the headers of a shard that has been looked up, or of its copy `content`, and writes its index.
    `cross_check`: compares the number of samples with the files that list it. Raises DataError."""
    captions, retry_s = shard.captions, shard.access.retry_s
    with errors_as(DataError, f"shard {shard.url} cannot be read", "check the URL and the permission to read it"):
        tar = scan(content or shard.url, shard.size, retry_s)
    rows, bad, notes = [], list[BadRecord](), list[BadRecord]()
    names, skipped = [], []
    digest = hashlib.sha256()
    for number, sample in enumerate(tar.samples):
        digest.update(f"{sample.name} {sorted(sample.read.items())}\n".encode("utf-8", "replace"))
        if fault := sample.fault(captions):
            bad.append(BadRecord(f"{shard.url}:{sample.name}", fault))
            skipped.append(number)
        else:
            rows.append(sample.row())
            names.append(sample.name)
    listed, file = listed_in_files(shard.url, retry_s) if cross_check else (None, "")
    if tar.damage:
        if tar.samples and tar.samples[-1].fault(captions):
            bad.pop()  # the damage is the reason why members of the last sample are missing
        of = "" if listed is None else f", of {listed:,} listed by {file}"
        bad.append(BadRecord(shard.url, f"shard {tar.damage}; {len(rows):,} samples before it are used{of}"))
    elif listed not in (None, len(tar.samples)):
        count = f"shard has {len(tar.samples):,} samples, but {file} lists {listed:,}; those in the shard are used"
        notes.append(BadRecord(shard.url, count))
    notes += _name_notes(shard.url, tar)
    shard.save(rows, digest.hexdigest()[:16], bad, notes, names, skipped)


def _name_notes(url: str, tar: TarContent) -> list[BadRecord]:
    """Returns notes on the images that are not read because of their names."""
    several = [sample.name for sample in tar.samples if len(sample.read) < len(sample.members)]
    order = ", ".join(name for name, column in COLUMNS.items() if column == IMAGE)
    notes = []
    for found, note in (
        (tar.dotted, "images are not read: the name of a sample ends at the first dot; name them such as a_b.jpg"),
        (tar.hidden, "hidden images are not read: macOS writes ._ files; rename other images"),
        (several, f"samples have several images, of which the first in the order {order} is read"),
    ):
        notes += [BadRecord(f"{url}:{name}", f"{len(found):,} {note}") for name in found[:1]]
    return notes
