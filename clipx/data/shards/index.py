"""Indices of shards: the offset and size of each sample's members, read once from the tar headers and cached."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.data.shards.tar import JSON, TXT, scan
from clipx.data.shards.write import run_in_pool
from clipx.data.source import BadRecord
from clipx.errors import DataError, StorageRefused
from clipx.storage.local import cache_folder, write_atomically
from clipx.storage.remote import errors_as, file_system, is_local, read_file, retry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Table = NDArray[np.int64]
    """[samples, 4 members, (offset, size)]; size -1 if the member is missing."""

RETRY_S = 120.0
"""Default time in seconds for the retries of a remote read."""

_VERSION = 5
# Keys of fsspec's file systems for the modification time or checksum of a file; those of local files first.
_VERSIONS = ("mtime", "ETag", "etag", "md5Hash", "LastModified", "last_modified", "Last-Modified", "updated", "created")
# Remote shards read concurrently: a reader mostly waits for the network. Up to this number, threads read them, because
# each process would first take a second to open its session. Above it, processes read them, because Python parses
# headers on one core only.
_REMOTE = 16
_FIX = "check the URL and the permission to read it"


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Index of a shard: the path of its table, the number of usable samples, the skipped samples, and notes."""

    table: str
    samples: int
    digest: str
    """Digest of the names, offsets and sizes of the members."""

    bad: Sequence[BadRecord]

    notes: Sequence[BadRecord]
    """Remarks on the shard that are not about a skipped sample."""

    size: int
    """Size of the shard in bytes."""


def index_shards(urls: Sequence[str], *captions: int, retry_s: float = RETRY_S) -> list[ShardIndex]:
    """Returns the index of each shard. Creates the indices that are not in the cache.

    A usable sample has an image and a member in at least one of the columns `captions`. Raises DataError if a shard
    does not exist or cannot be read.
    """
    with ThreadPoolExecutor(32) as pool:  # a remote request takes about 50 ms
        found = list(pool.map(partial(_table_path, cache_folder("index"), captions, retry_s), urls))
    items = [_Lookup(url, path, size) for url, (path, size) in zip(urls, found, strict=True)]
    new = [item for item in items if not (item.table.is_file() and _meta(item.table).is_file())]
    make = partial(_index_shard, captions, retry_s)
    if all(is_local(item.url) for item in new):
        run_in_pool(make, new, "indexing")
    elif len(new) <= _REMOTE:
        run_in_pool(make, new, "indexing", threads=_REMOTE)
    else:
        run_in_pool(make, new, "indexing", processes=max(_REMOTE, len(os.sched_getaffinity(0))))
    return [_load(item) for item in items]


def fingerprint(caption_keys: Iterable[str], label_key: str | None, indices: Sequence[ShardIndex]) -> str:
    """Returns the fingerprint of a data set.

    It depends on the content of the shards and on the keys that are read, not on the location of the shards nor on the
    weights of the keys.
    """
    facts = [" + ".join(caption_keys), str(label_key), *(index.digest for index in indices)]
    return hashlib.sha256("\n".join(facts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def caption_columns(keys: Iterable[str]) -> list[int]:
    """Returns the columns of a table that hold the captions of these keys."""
    return sorted({TXT if key == "txt" else JSON for key in keys})


@lru_cache(maxsize=256)
def load_table(path: str) -> Table:
    """Maps a table into memory, which loader processes share."""
    import numpy as np

    table: Table = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    return table


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A shard and the path of its table. The table need not exist."""

    url: str
    table: Path
    size: int


def _table_path(cache: Path, captions: Sequence[int], retry_s: float, url: str) -> tuple[Path, int]:
    """Returns the path of the shard's table in the cache, whose name changes with the shard, and the shard's size."""

    def call() -> dict[str, Any]:
        fs, path = file_system(url)
        found: dict[str, Any] = fs.info(path)
        return found

    try:
        with errors_as(DataError, f"shard {url} cannot be opened", _FIX, FileNotFoundError):
            info = retry(url, retry_s, call)
    except FileNotFoundError:
        raise DataError(f"shard {url} does not exist: check the path") from None
    if info["type"] == "directory":
        raise DataError(f"shard {url} is a folder: give its tar files, e.g. {url.rstrip('/')}/*.tar")
    if info["size"] is None:
        raise DataError(
            f"shard {url} has no known size, which random access needs: copy it to a storage that reports sizes"
        )
    version = next((info[key] for key in _VERSIONS if info.get(key)), None)
    location = url if "://" in url else Path(url).resolve()
    identity = f"{_VERSION} {'+'.join(map(str, captions))} {location} {info['size']} {version}"
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return cache / f"{digest}.npy", int(info["size"])


def _meta(table_path: Path) -> Path:
    return table_path.with_suffix(".json")


def _load(item: _Lookup) -> ShardIndex:
    meta = json.loads(_meta(item.table).read_text())
    bad, notes = ([BadRecord(*record) for record in meta[name]] for name in ("bad", "notes"))
    return ShardIndex(str(item.table), meta["samples"], meta["digest"], bad, notes, item.size)


def _index_shard(captions: Sequence[int], retry_s: float, item: _Lookup) -> None:
    import numpy as np

    with errors_as(DataError, f"shard {item.url} cannot be read", _FIX):
        tar = scan(item.url, item.size, retry_s)
    rows, bad, notes = [], list[BadRecord](), list[BadRecord]()
    digest = hashlib.sha256()
    for sample in tar.samples:
        digest.update(f"{sample.name} {sorted(sample.read.items())}\n".encode("utf-8", "replace"))
        if fault := sample.fault(captions):
            bad.append(BadRecord(f"{item.url}:{sample.name}", fault))
        else:
            rows.append(sample.row())
    listed, file = _listed(item.url, retry_s)
    if tar.damage:
        if tar.samples and tar.samples[-1].fault(captions):
            bad.pop()  # the damage is the reason why members of the last sample are missing
        of = "" if listed is None else f", of {listed:,} listed by {file}"
        bad.append(BadRecord(item.url, f"shard {tar.damage}; {len(rows):,} samples before it are used{of}"))
    elif listed not in (None, len(tar.samples)):
        count = f"shard has {len(tar.samples):,} samples, but {file} lists {listed:,}; those in the shard are used"
        notes.append(BadRecord(item.url, count))
    if tar.dotted:
        notes.append(BadRecord(item.url, _dotted_note(tar.dotted)))
    records = {name: [(one.key, one.reason) for one in found] for name, found in (("bad", bad), ("notes", notes))}
    meta = json.dumps({"samples": len(rows), "digest": digest.hexdigest()[:16], **records})

    def save(path: str) -> None:
        with open(path, "wb") as file:  # noqa: PTH123
            np.save(file, np.asarray(rows, dtype=np.int64).reshape(-1, 4, 2), allow_pickle=False)

    write_atomically(item.table, save)
    write_atomically(_meta(item.table), lambda path: Path(path).write_text(meta))


def _dotted_note(members: Sequence[str]) -> str:
    base = members[0].rpartition("/")[2]
    stem, _, extension = base.partition(".")
    better = "_".join(base.rsplit(".", 1)[0].split(".")) + "." + base.rpartition(".")[2]
    return (
        f"{len(members):,} images are not read because of the dots in their names, e.g. {members[0]}: the name of a "
        f"sample ends at the first dot, here {stem}, and {extension} is no extension of an image; name it {better}"
    )


# ------------------------------------------------------------------------------------------------------ counts


def _listed(url: str, retry_s: float) -> tuple[int | None, str]:
    """Returns the published number of samples of a shard, None if unknown, and the name of the file that lists it.

    The count is in img2dataset's `_stats.json` of the shard, or in `sizes.json` of its folder, which open_clip also
    reads.
    """
    folder, slash, name = url.rpartition("/")
    stats = f"{url.removesuffix('.tar')}_stats.json"
    for file, key in ((stats, "successes"), (f"{folder}{slash}sizes.json", name)):
        if isinstance(listed := _counts(file, retry_s).get(key), int):
            return listed, file.rpartition("/")[2]
    return None, ""


@lru_cache(maxsize=64)  # all shards of a folder share one sizes.json
def _counts(url: str, retry_s: float) -> dict[str, Any]:
    """Reads a JSON object. Returns {} if it is missing or unreadable, because it serves as a cross-check only.

    Raises DataError if the storage fails for `retry_s`.
    """
    try:
        found = json.loads(read_file(url, retry_s))
    except StorageRefused:  # S3 answers so if the file is missing and the credentials may not list the bucket
        return {}
    except DataError:
        raise
    except Exception:  # missing or not JSON: a remote file system raises the exceptions of its library
        return {}
    return found if isinstance(found, dict) else {}
