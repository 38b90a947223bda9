"""Where each sample of a shard lies: made once by reading the tar's headers, kept in the cache, reused afterwards.

`python -m clipx.data.index shards=…` does that before a run, in parallel, on one machine or as an array of jobs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.cli import cli
from clipx.config.registry import MISSING, option
from clipx.data.shards.tar import JSON, TXT, scan
from clipx.data.shards.write import run_in_pool
from clipx.data.source import BadRecord, caption_weights, check_held_out_share, check_key, without_numbers
from clipx.errors import DataError, require
from clipx.storage.local import cache_folder, write_atomically
from clipx.storage.remote import errors_as, file_system, is_local, read_file, retry
from clipx.storage.url import check_path

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Table = NDArray[np.int64]
    """[samples, 4 members, (offset, size)]; size -1 where the member is missing."""

RETRY_S = 120.0
_VERSION = 3
# What file systems of fsspec call the time or the checksum of a file, local ones first.
_VERSIONS = ("mtime", "ETag", "etag", "md5Hash", "LastModified", "last_modified", "Last-Modified", "updated", "created")
# Remote shards at a time: a reader waits for the network most of the time. Few are read by threads, for each process
# would first spend a second on a session of its own; many by processes, for Python reads headers on one core.
_REMOTE = 16


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A shard's index: the path of its table, how many samples that has, and what was left out."""

    table: str
    samples: int
    digest: str  # of the members' names, places and sizes
    bad: Sequence[BadRecord]
    size: int  # bytes of the shard


def index_shards(urls: Sequence[str], *captions: int, retry_s: float = RETRY_S) -> list[ShardIndex]:
    """The index of each shard; those not in the cache are made first. Raises DataError for a shard that is not there.

    A sample is one with an image and a member in one of the columns `captions`.
    """
    with ThreadPoolExecutor(32) as pool:  # a remote shard answers after some 50 ms
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
    """Of a data set: of what is in the shards and which of it is read, not of where they are nor how often."""
    facts = [" + ".join(caption_keys), str(label_key), *(index.digest for index in indices)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def caption_columns(keys: Iterable[str]) -> list[int]:
    """Where captions of these keys are."""
    return sorted({TXT if key == "txt" else JSON for key in keys})


@lru_cache(maxsize=256)
def load_table(path: str) -> Table:
    """Mapped, so that loader processes share its memory."""
    import numpy as np

    table: Table = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    return table


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A shard and the path of its table, which need not exist yet."""

    url: str
    table: Path
    size: int


def _table_path(cache: Path, captions: Sequence[int], retry_s: float, url: str) -> tuple[Path, int]:
    """The path in the cache, whose name changes when the shard does, and the shard's size."""

    def call() -> dict[str, Any]:
        fs, path = file_system(url)
        found: dict[str, Any] = fs.info(path)
        return found

    try:
        with errors_as(lambda reason: DataError(f"shard {url} cannot be opened: {reason}"), FileNotFoundError):
            info = retry(url, retry_s, call)
    except FileNotFoundError:
        raise DataError(f"shard {url} does not exist: check the path") from None
    if info["type"] == "directory":
        raise DataError(f"shard {url} is a folder: give its tar files, e.g. {url.rstrip('/')}/*.tar")
    if info["size"] is None:
        raise DataError(f"shard {url} has no known size, so it cannot be read at random: copy it to a store that has")
    version = next((info[key] for key in _VERSIONS if info.get(key)), None)
    location = url if "://" in url else Path(url).resolve()
    identity = f"{_VERSION} {'+'.join(map(str, captions))} {location} {info['size']} {version}"
    return cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npy", int(info["size"])


def _meta(table_path: Path) -> Path:
    return table_path.with_suffix(".json")


def _load(item: _Lookup) -> ShardIndex:
    meta = json.loads(_meta(item.table).read_text())
    return ShardIndex(
        str(item.table), meta["samples"], meta["digest"], [BadRecord(*bad) for bad in meta["bad"]], item.size
    )


def _index_shard(captions: Sequence[int], retry_s: float, item: _Lookup) -> None:
    import numpy as np

    with errors_as(lambda reason: DataError(f"shard {item.url} cannot be read: {reason}")):
        samples, damage = scan(item.url, item.size, retry_s)
    rows, bad = [], []
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample.name} {sorted(sample.members.items())}\n".encode("utf-8", "replace"))
        if fault := sample.fault(captions):
            bad.append((f"{item.url}:{sample.name}", fault))
        else:
            rows.append(sample.row())
    if damage:
        if samples and samples[-1].fault(captions):
            bad.pop()  # it is the damage that the last sample's members are missing for
        bad.append((item.url, f"shard {damage}; {len(rows):,} samples before that are used"))
    if shortfall := _shortfall(item.url, len(rows), retry_s):
        bad.append((item.url, shortfall))
    meta = json.dumps({"samples": len(rows), "digest": digest.hexdigest()[:16], "bad": bad})

    def save(path: str) -> None:
        with open(path, "wb") as file:  # noqa: PTH123
            np.save(file, np.asarray(rows, dtype=np.int64).reshape(-1, 4, 2), allow_pickle=False)

    write_atomically(item.table, save)
    write_atomically(_meta(item.table), lambda path: Path(path).write_text(meta))


# ------------------------------------------------------------------------------------------------------ counts


def _shortfall(url: str, samples: int, retry_s: float) -> str | None:
    """Compares with img2dataset's counts of the shard, or with sizes.json of its folder, which open_clip reads too."""
    folder, slash, name = url.rpartition("/")
    stats = f"{url.removesuffix('.tar')}_stats.json"
    for file, key in ((stats, "successes"), (f"{folder}{slash}sizes.json", name)):
        expected = _counts(file, retry_s).get(key)
        if isinstance(expected, int):
            found_in = file.rpartition("/")[2]
            few = samples < expected
            return f"shard has {samples:,} samples that can be used where {found_in} says {expected:,}" if few else None
    return None


@lru_cache(maxsize=64)  # the shards of a folder share one sizes.json
def _counts(url: str, retry_s: float) -> dict[str, Any]:
    """A JSON object that may not be there. One that cannot be read is ignored, for it is a cross-check only."""
    try:
        found = json.loads(read_file(url, retry_s))
    except DataError:
        raise
    except Exception:  # not there, forbidden, no JSON: a remote file system raises what its library does
        return {}
    return found if isinstance(found, dict) else {}


# --------------------------------------------------------------------------------------------------- the command


@option("")
@dataclass(kw_only=True, slots=True)
class IndexSpec:
    """`python -m clipx.data.index`: indexes shards as a run would, and says what they hold."""

    kind: str = "index"
    shards: str = MISSING  # as data.shards: path, brace pattern, glob, @list.txt or URL; several joined by ::
    caption_key: Any = "txt"  # as data.caption_key: where captions are decides which samples count, weights do not
    label_key: str | None = None  # as data.label_key; it is in the fingerprint only
    held_out_share: float = 0.05  # as data.held_out_share: not part of an epoch
    part: str | None = None  # k/N: the k-th of N shares of the shards, from 1; for an array of N jobs
    manifest: str | None = None  # a JSON file to write: each shard's url, samples, bytes and digest, and the total
    retry_s: float = RETRY_S  # as data.retry_s

    def __post_init__(self) -> None:
        caption_weights("caption_key", self.caption_key)
        check_key("label_key", self.label_key, "cls")
        check_held_out_share(self.held_out_share)
        if self.manifest is not None:
            check_path("manifest", self.manifest)
        k, n = self.share
        require(1 <= k <= n, f"part={self.part} must be k/N with 1 ≤ k ≤ N, e.g. part=3/16 for the third of 16 jobs")
        require(
            self.part is None or self.manifest is None,
            f"manifest={self.manifest} is of all shards, part={self.part} reads a share: give it after the last part",
        )

    @property
    def caption_keys(self) -> Sequence[str]:
        return list(caption_weights("caption_key", self.caption_key))

    @property
    def share(self) -> tuple[int, int]:
        """(k, N) of `part`; (0, 0) where it is neither."""
        if self.part is None:
            return 1, 1
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.part)
        return (int(found[1]), int(found[2])) if found else (0, 0)


def index(spec: IndexSpec) -> None:
    """Shard i belongs to part 1 + i mod N: shards of one size or growing ones spread evenly."""
    from clipx.data.shards.urls import expand
    from clipx.report.console import stdout_console

    k, n = spec.share
    everything = expand(spec.shards, "shards")
    urls = everything[k - 1 :: n]
    console = stdout_console()
    if not urls:
        console.print(f"part {k} of {n} of {len(everything)} shards is empty: nothing to do")
        return
    indices = index_shards(urls, *caption_columns(spec.caption_keys), retry_s=spec.retry_s)
    console.print(summary_table(spec, indices))
    for line in _bad_sample_summary(indices):
        console.print(line, markup=False)
    if spec.manifest is not None:
        write_manifest(spec, Path(spec.manifest).expanduser(), urls, indices)
        console.print(f"written to {spec.manifest}", markup=False)


def summary_table(spec: IndexSpec, indices: Sequence[ShardIndex]) -> Any:
    from rich.table import Table as RichTable

    samples = sum(index.samples for index in indices)
    held_out = int(samples * spec.held_out_share)
    part = "" if spec.part is None else f", part {spec.part}"
    table = RichTable(title=f"{spec.shards}{part}", title_justify="left")
    row = {
        "shards": f"{len(indices):,}",
        "samples": f"{samples:,}",
        "bytes": f"{sum(index.size for index in indices):,}",
        "bad": f"{sum(len(index.bad) for index in indices):,}",
        "epoch length": f"{samples - held_out:,} samples" + (f" ({held_out:,} held out)" if held_out else ""),
        "fingerprint": fingerprint(spec.caption_keys, spec.label_key, indices),
    }
    for name in row if spec.part is None else list(row)[:4]:
        table.add_column(name, justify="right")
    table.add_row(*list(row.values())[: len(table.columns)])
    return table


def _bad_sample_summary(indices: Sequence[ShardIndex], most: int = 10) -> list[str]:
    """How often each reason occurs, with an example."""
    bad = [item for index in indices for item in index.bad]
    reasons = [without_numbers(item.reason) for item in bad]
    counts = Counter(reasons)
    lines = [
        f"{count:,} × {bad[reasons.index(reason)].reason}: {bad[reasons.index(reason)].key}"
        + (" …" if count > 1 else "")
        for reason, count in counts.most_common(most)
    ]
    return lines + ([f"and {len(counts) - most} reasons more"] if len(counts) > most else [])


def write_manifest(spec: IndexSpec, path: Path, urls: Sequence[str], indices: Sequence[ShardIndex]) -> None:
    """Writes each shard's url, samples, bytes and digest, and the total, as JSON."""
    shards = [
        {"url": url, "samples": index.samples, "bytes": index.size, "digest": index.digest}
        for url, index in zip(urls, indices, strict=True)
    ]
    manifest = {
        "caption_key": spec.caption_key,
        "samples": sum(index.samples for index in indices),
        "fingerprint": fingerprint(spec.caption_keys, spec.label_key, indices),
        "shards": shards,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda other: Path(other).write_text(json.dumps(manifest, indent=1) + "\n"))


main = cli(index, "index")

if __name__ == "__main__":
    # The functions that processes call are then found under their own name, in the module that others import.
    import clipx.data.index

    clipx.data.index.main()
