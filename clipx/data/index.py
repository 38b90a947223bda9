"""Where each sample of a shard lies: made once by reading the tar's headers, kept in the cache, reused afterwards."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from clipx.data.source import MAX_BYTES, Bad
from clipx.data.write import cache_folder, in_pool, write_whole
from clipx.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Table = NDArray[np.int64]
    """[samples, 4 members, (offset, size)]; size -1 where the member is missing."""

COLUMNS = {"jpg": 0, "jpeg": 0, "png": 0, "webp": 0, "txt": 1, "json": 2, "cls": 3}  # the only members ever read
IMAGE, TXT, JSON, CLS = range(4)
_VERSION = 2
_MISSING = (0, -1)


@dataclass(frozen=True, slots=True)
class Index:
    """A shard's index: the path of its table, how many samples that has, and what was left out."""

    table: str
    samples: int
    digest: str  # of the members' names, places and sizes
    bad: Sequence[Bad]


def index_shards(urls: Sequence[str], caption_column: int) -> list[Index]:
    """The index of each shard; those not in the cache are made first. Raises DataError for a shard that is not there.

    A sample is one with an image and a member in the caption's column.
    """
    with ThreadPoolExecutor(32) as pool:  # a remote shard answers after some 50 ms
        paths = list(pool.map(partial(_table_path, cache_folder("index"), caption_column), urls))
    new = [(url, path) for url, path in zip(urls, paths, strict=True) if not (path.is_file() and _meta(path).is_file())]
    in_pool(partial(_index_shard, caption_column), new, "indexing")
    return [_load(path) for path in paths]


@lru_cache(maxsize=256)
def load_table(path: str) -> Table:
    """Mapped, so that loader processes share its memory."""
    import numpy as np

    table: Table = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    return table


def _table_path(cache: Path, caption_column: int, url: str) -> Path:
    """In the cache, under a name that changes when the shard does."""
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
        info = fs.info(path)
    except FileNotFoundError:
        raise DataError(f"shard {url} does not exist: check the path") from None
    except Exception as error:  # a remote file system raises what its library does
        raise DataError(f"shard {url} cannot be opened: {str(error) or type(error).__name__}") from None
    if info["type"] == "directory":
        raise DataError(f"shard {url} is a folder: give its tar files, e.g. {url.rstrip('/')}/*.tar")
    version = info.get("mtime") or info.get("ETag") or info.get("LastModified")
    place = url if "://" in url else Path(url).resolve()
    identity = f"{_VERSION} {caption_column} {place} {info['size']} {version}"
    return cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npy"


def _meta(table_path: Path) -> Path:
    return table_path.with_suffix(".json")


def _load(table_path: Path) -> Index:
    meta = json.loads(_meta(table_path).read_text())
    return Index(str(table_path), meta["samples"], meta["digest"], [Bad(*item) for item in meta["bad"]])


def _index_shard(caption_column: int, item: tuple[str, Path]) -> None:
    import numpy as np

    url, table_path = item
    entries, damage = _scan(url)
    rows, bad = [], []
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.name} {sorted(entry.members.items())}\n".encode("utf-8", "replace"))
        if fault := entry.fault(caption_column):
            bad.append((f"{url}:{entry.name}", fault))
        else:
            rows.append(entry.row())
    if damage:
        if entries and entries[-1].fault(caption_column):
            bad.pop()  # it is the damage that the last sample's members are missing for
        bad.append((url, f"shard {damage}; {len(rows):,} samples before that are used"))
    meta = json.dumps({"samples": len(rows), "digest": digest.hexdigest()[:16], "bad": bad})

    def save(path: str) -> None:
        with open(path, "wb") as file:  # noqa: PTH123
            np.save(file, np.asarray(rows, dtype=np.int64).reshape(-1, 4, 2), allow_pickle=False)

    write_whole(table_path, save)
    write_whole(_meta(table_path), lambda path: Path(path).write_text(meta))


@dataclass(frozen=True, slots=True)
class _Entry:
    """A sample of a tar: (offset, size) of each member by its ending."""

    name: str
    members: dict[str, tuple[int, int]] = field(default_factory=dict)

    def row(self) -> list[tuple[int, int]]:
        row = [_MISSING] * 4
        for ending, place in self.members.items():
            row[COLUMNS[ending]] = place
        return row

    def fault(self, caption_column: int) -> str | None:
        row = self.row()
        for column, what in ((IMAGE, "image"), (caption_column, "caption")):
            if row[column][1] <= 0:
                return f"{what} is missing or empty"
        if max(size for _, size in row) > MAX_BYTES:
            return f"a member is larger than {MAX_BYTES >> 20} MiB"
        return None


def _scan(url: str) -> tuple[list[_Entry], str | None]:
    """The samples of a tar in the order of their first members, and what is wrong with the tar.

    Members of a sample need not be neighbours, as they are not in a tar of an unsorted folder.
    """
    import fsspec

    entries: list[_Entry] = []
    newest: dict[str, _Entry] = {}
    fs, path = fsspec.core.url_to_fs(url)
    size = fs.size(path)
    try:
        with fs.open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:  # r: no compressed bomb
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every header
                if member.size < 0 or (size is not None and member.offset_data + member.size > size):
                    return entries, f"is cut off inside {member.name}"
                folder, slash, base = member.name.rpartition("/")
                stem, _, ending = base.partition(".")
                name, ending = f"{folder}{slash}{stem}", ending.lower()
                if ending not in COLUMNS or not member.isreg() or member.issparse():
                    continue
                if name not in newest or ending in newest[name].members:  # or another sample of the same name
                    newest[name] = _Entry(name)
                    entries.append(newest[name])
                newest[name].members[ending] = (member.offset_data, member.size)
            return entries, _end_damage(file, tar.offset)
    except tarfile.TarError as error:
        return entries, f"cannot be read as an uncompressed tar: {error}"
    except Exception as error:  # a remote file system raises what its library does
        raise DataError(f"shard {url} cannot be read: {str(error) or type(error).__name__}") from None


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
