"""Indices of shards: the offset and size of each sample's members, read once from the tar headers and cached."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.data.shards.write import run_in_pool
from clipx.data.source import BadRecord
from clipx.errors import DataError
from clipx.storage.files import errors_as, file_info, is_local
from clipx.storage.local import cache_folder, write_atomically, write_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from clipx.data.shards.tar import TarContent

    Table = NDArray[np.int64]
    """[samples, 4 members, (offset, size)]; size -1 if the member is missing."""

IMAGE, TXT, JSON, CLS = range(4)
"""The members of a sample, in the order of the columns of a table."""

Row = Sequence[tuple[int, int]]
"""Row of a table: (offset, size) of each member."""

RETRY_S = 120.0
"""Default time in seconds for the retries of a remote read."""

_VERSION = 7  # of the choice of members, too: a cached index holds it
# Keys of fsspec's file systems for the modification time or checksum of a file; those of local files first.
_VERSIONS = (
    "mtime",
    "ETag",
    "etag",
    "md5Hash",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "updated",
    "created",
    "blob_id",  # of the Hugging Face hub
)
# Remote shards read concurrently: a reader mostly waits for the network. Up to this number, threads read them, because
# each process would first take a second to open its session. Above it, processes read them, because Python parses
# headers on one core only.
_REMOTE = 16
_FIX = "check the URL and the permission to read it"


class MissingShard(DataError):
    """A shard does not exist."""


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

    skipped: Sequence[int] = ()
    """Numbers of the skipped samples among all samples of the shard, from 0."""

    @property
    def keys(self) -> str:
        """Path of the digests of the samples' names, [samples] (u8, u8): see `key_digests`."""
        return str(Path(self.table).with_suffix(".keys"))

    def places(self, listed: int) -> NDArray[np.int64]:
        """Returns the places of the usable samples in a shard with a listed number of samples.

        If the skipped samples are listed too, each has its place. A shard that has fewer samples otherwise lacks the
        last ones, and the last samples of one that has more have no place.
        """
        import numpy as np

        if listed == self.samples + len(self.skipped):
            return np.delete(np.arange(listed), list(self.skipped))
        return np.arange(min(listed, self.samples))


def index_shards(urls: Sequence[str], *captions: int, retry_s: float = RETRY_S) -> list[ShardIndex]:
    """Returns the index of each shard. Creates the indices that are not in the cache.

    A usable sample has an image and a member in at least one of the columns `captions`. Raises DataError if a shard
    does not exist or cannot be read.
    """
    with ThreadPoolExecutor(32) as pool:  # a remote request takes about 50 ms
        items = list(pool.map(partial(find_shard, captions, retry_s), urls))
    new = [item for item in items if not item.indexed]
    make = partial(make_index, captions, retry_s)
    if all(is_local(item.url) for item in new):
        run_in_pool(make, new, "indexing")
    elif len(new) <= _REMOTE:
        run_in_pool(make, new, "indexing", threads=_REMOTE)
    else:
        run_in_pool(make, new, "indexing", processes=max(_REMOTE, len(os.sched_getaffinity(0))))
    return [item.load() for item in items]


def fingerprint(caption_keys: Iterable[str], label_key: str | None, digests: Iterable[str]) -> str:
    """Returns the fingerprint of a data set from the digests of its shards.

    It depends on the content of the shards and on the keys that are read, not on the location of the shards nor on the
    weights of the keys.
    """
    facts = [" + ".join(caption_keys), str(label_key), *digests]
    return hashlib.sha256("\n".join(facts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def key_digests(names: Iterable[str]) -> NDArray[np.void]:
    """Returns a digest of 128 bits of each sample's name, as (u8, u8). A leading ./ of a name is ignored."""
    import numpy as np

    encoded = (name.removeprefix("./").encode("utf-8", "replace") for name in names)
    digests = b"".join(hashlib.blake2b(name, digest_size=16).digest() for name in encoded)
    return np.frombuffer(digests, dtype="<u8,<u8")


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
class FoundShard:
    """A shard and the path of its table, whose name changes with the shard. The table need not exist."""

    url: str
    table: Path
    size: int

    @property
    def meta(self) -> Path:
        return self.table.with_suffix(".json")

    @property
    def indexed(self) -> bool:
        return self.table.is_file() and self.meta.is_file()

    def load(self) -> ShardIndex:
        meta = json.loads(self.meta.read_text())
        bad, notes = ([BadRecord(*record) for record in meta[name]] for name in ("bad", "notes"))
        return ShardIndex(str(self.table), meta["samples"], meta["digest"], bad, notes, self.size, meta["skipped"])

    def save(
        self,
        rows: Sequence[Row],
        digest: str,
        bad: Sequence[BadRecord],
        notes: Sequence[BadRecord] = (),
        names: Sequence[str] = (),
        skipped: Sequence[int] = (),
    ) -> None:
        """Writes the table, the digests of the names and the rest of the index. Raises DataError."""
        import numpy as np

        records = {name: [(one.key, one.reason) for one in found] for name, found in (("bad", bad), ("notes", notes))}
        meta = json.dumps({"samples": len(rows), "digest": digest, "skipped": list(skipped), **records})

        def save(path: str, array: NDArray[Any]) -> None:
            with Path(path).open("xb") as file:
                np.save(file, array, allow_pickle=False)

        write_atomically(self.table.with_suffix(".keys"), partial(save, array=key_digests(names)))
        table = np.asarray(rows, dtype=np.int64).reshape(-1, 4, 2)
        write_atomically(self.table, partial(save, array=table))
        write_text(self.meta, meta)


def find_shard(captions: Sequence[int], retry_s: float, url: str, patient: bool = False) -> FoundShard:
    """Looks up a shard's size and version. Raises DataError, and MissingShard if it does not exist."""
    info = shard_info(url, retry_s, patient)
    version = next((info[key] for key in _VERSIONS if info.get(key)), None)
    location = url if "://" in url else Path(url).resolve()
    identity = f"{_VERSION} {'+'.join(map(str, captions))} {location} {info['size']} {version}"
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return FoundShard(url, cache_folder("index") / f"{digest}.npy", int(info["size"]))


def shard_info(url: str, retry_s: float, patient: bool = False) -> Mapping[str, Any]:
    """Returns what the storage knows of a shard, its size among it. Raises as `find_shard`. Writes nothing."""
    try:
        with errors_as(DataError, f"shard {url} cannot be opened", _FIX, FileNotFoundError):
            info = file_info(url, retry_s, patient)
    except FileNotFoundError:
        raise MissingShard(f"shard {url} does not exist: check the path") from None
    if info["type"] == "directory":
        raise DataError(f"shard {url} is a folder: give its tar files, e.g. {url.rstrip('/')}/*.tar")
    if info["size"] is None:
        raise DataError(
            f"shard {url} has no known size, which random access needs: copy it to a storage that reports sizes"
        )
    return info


def make_index(
    captions: Sequence[int], retry_s: float, item: FoundShard, content: str | None = None, cross_check: bool = True
) -> None:
    """Reads the headers of a shard and writes its index.

    Args:
        captions: columns that hold captions.
        retry_s: time for the retries of a read.
        item: the shard.
        content: path of a copy of the shard, which is read instead. None: there is none.
        cross_check: whether to compare the number of samples with the files that list it.
    """
    from clipx.data.shards.counts import listed_in_files
    from clipx.data.shards.tar import scan

    with errors_as(DataError, f"shard {item.url} cannot be read", _FIX):
        tar = scan(content or item.url, item.size, retry_s)
    rows, bad, notes = [], list[BadRecord](), list[BadRecord]()
    names, skipped = [], []
    digest = hashlib.sha256()
    for number, sample in enumerate(tar.samples):
        digest.update(f"{sample.name} {sorted(sample.read.items())}\n".encode("utf-8", "replace"))
        if fault := sample.fault(captions):
            bad.append(BadRecord(f"{item.url}:{sample.name}", fault))
            skipped.append(number)
        else:
            rows.append(sample.row())
            names.append(sample.name)
    listed, file = listed_in_files(item.url, retry_s) if cross_check else (None, "")
    if tar.damage:
        if tar.samples and tar.samples[-1].fault(captions):
            bad.pop()  # the damage is the reason why members of the last sample are missing
        of = "" if listed is None else f", of {listed:,} listed by {file}"
        bad.append(BadRecord(item.url, f"shard {tar.damage}; {len(rows):,} samples before it are used{of}"))
    elif listed not in (None, len(tar.samples)):
        count = f"shard has {len(tar.samples):,} samples, but {file} lists {listed:,}; those in the shard are used"
        notes.append(BadRecord(item.url, count))
    notes += _name_notes(item.url, tar)
    item.save(rows, digest.hexdigest()[:16], bad, notes, names, skipped)


def _name_notes(url: str, tar: TarContent) -> list[BadRecord]:
    """Returns notes on the images that are not read because of their names."""
    from clipx.data.shards.tar import COLUMNS

    several = [sample.name for sample in tar.samples if len(sample.read) < len(sample.members)]
    order = ", ".join(name for name, column in COLUMNS.items() if column == IMAGE)
    notes = [BadRecord(url, _dotted_note(tar.dotted))] if tar.dotted else []
    for found, note in (
        (tar.hidden, "hidden images are not read: macOS writes ._ files; rename other images"),
        (several, f"samples have several images, of which the first in the order {order} is read"),
    ):
        notes += [BadRecord(f"{url}:{name}", f"{len(found):,} {note}") for name in found[:1]]
    return notes


def _dotted_note(members: Sequence[str]) -> str:
    base = members[0].rpartition("/")[2]
    stem, _, extension = base.partition(".")
    better = "_".join(base.rsplit(".", 1)[0].split(".")) + "." + base.rpartition(".")[2]
    return (
        f"{len(members):,} images are not read because of the dots in their names, e.g. {members[0]}: the name of a "
        f"sample ends at the first dot, here {stem}, and {extension} is no extension of an image; name it {better}"
    )
