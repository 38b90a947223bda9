"""WebDataset shards, as img2dataset writes them: jpg (or jpeg, png, webp) + txt + json, read at random by an index.

A shard's index is a table of where each sample's members lie. It is made once, by reading the tar's headers, and kept
in the cache; opening a data set afterwards only looks at the shards' sizes and times. Only members on an allow-list
are ever read, and none of them can execute anything.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
import tarfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from clipx.config import option
from clipx.data import Dataset, DataSpec
from clipx.data.source import Bad, BadSample, Sample, Source, caption_text, split
from clipx.data.write import cache_root
from clipx.errors import ConfigError, DataError, require

_COLUMNS = {"jpg": 0, "jpeg": 0, "png": 0, "webp": 0, "txt": 1, "json": 2, "cls": 3}
_IMAGE, _TXT, _JSON, _CLS = range(4)
_INDEX_VERSION = 1

Table = NDArray[np.int64]
"""[samples, 4 members, (offset, size)]; size -1 where the member is missing."""


@option("data")
@dataclass(kw_only=True, slots=True)
class WebDatasetSpec(DataSpec):
    kind: str = "webdataset"
    shards: str | None = None  # path, brace pattern, glob or fsspec URL; several joined by ::
    held_out_shards: str | None = None  # likewise, to evaluate on
    held_out_share: float = 0.05  # share of the samples held out where held_out_shards is not given; 0 for none
    caption_key: str = "txt"  # the member txt, or a key of the json member: json.caption (text or list of texts)
    label_key: str | None = None  # the class of an image, for zero-shot: the member cls, or a key of json: json.label
    samples: int | None = None  # the published size, to compare with what is found

    def __post_init__(self) -> None:
        DataSpec.__post_init__(self)
        check_share(self.held_out_share)
        for name, value, member in (("caption_key", self.caption_key, "txt"), ("label_key", self.label_key, "cls")):
            require(
                value is None or value == member or value.startswith("json."),
                f"data.{name}={value} names no member that is read: give {member}, or json.KEY",
            )

    def open(self) -> Dataset:
        if self.shards is None:
            raise ConfigError(
                f"data.shards has no value: give the shards of {self.name}, e.g. data.shards='/data/{{0000..0123}}.tar'"
            )
        train: Source = self._open(self.shards, "data.shards")
        held_out: Source | None
        if self.held_out_shards is not None:
            held_out = self._open(self.held_out_shards, "data.held_out_shards")
        else:
            train, held_out = split(train, self.held_out_share)
        return Dataset(train, held_out, None)

    def _open(self, pattern: str, key: str) -> Shards:
        return Shards.open(expand(pattern, key), self.caption_key, self.label_key)


def check_share(share: float) -> None:
    require(0 <= share <= 0.5, f"data.held_out_share={share} must lie in [0, 0.5]: 0.05 holds out every 20th sample")


def expand(pattern: str, key: str) -> list[str]:
    """Braces, globs and :: to shard URLs, in order. Raises ConfigError where nothing is found."""
    from braceexpand import braceexpand

    urls: list[str] = []
    for part in filter(None, pattern.split("::")):
        for url in braceexpand(part):
            urls += sorted(glob.glob(url)) if glob.has_magic(url) else [url]  # noqa: PTH207
    require(bool(urls), f"{key}={pattern} matches no shard: check the path, and quote braces and stars in the shell")
    twice = {url for url in urls if urls.count(url) > 1} if len(set(urls)) < len(urls) else set()
    require(not twice, f"{key}={pattern} names {', '.join(sorted(twice)[:3])} twice: name each shard once")
    return urls


@dataclass(frozen=True, slots=True)
class Shards:
    """A source over tar files. `tables` are the paths of the shards' indices."""

    urls: Sequence[str]
    tables: Sequence[str]
    sizes: Sequence[int]
    bad: Sequence[Bad]
    fingerprint: str
    caption_key: str
    label_key: str | None
    _ends: Table = field(repr=False)

    @classmethod
    def open(cls, urls: Sequence[str], caption_key: str, label_key: str | None) -> Shards:
        """Indexes what is not indexed yet, with progress. Raises DataError where there is no sample at all."""
        found = _index_all(urls, caption_key)
        sizes = [size for _, size, _ in found]
        bad = [Bad(*item) for _, _, items in found for item in items]
        if not sum(sizes):
            reasons = f"; {bad[0].key}: {bad[0].reason}" if bad else ""
            raise DataError(
                f"{len(urls)} shards, from {urls[0]}, hold no sample with an image and a caption "
                f"(data.caption_key={caption_key}){reasons}"
            )
        fingerprint = hashlib.sha256("\n".join(Path(table).stem for table, _, _ in found).encode()).hexdigest()[:16]
        tables = [table for table, _, _ in found]
        return cls(urls, tables, sizes, bad, fingerprint, caption_key, label_key, np.cumsum(sizes))

    def _place(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - int(self._ends[shard]) + self.sizes[shard]

    def key(self, index: int) -> str:
        shard, row = self._place(index)
        offset = int(_table(self.tables[shard])[row, _IMAGE, 0])
        try:
            name = _read(self.urls[shard], offset - 512, offset - 412).rstrip(b"\0").decode("utf-8", "replace")
        except (OSError, BadSample):
            name = f"sample {row}"
        return f"{self.urls[shard]}:{name}"

    def read(self, index: int) -> Sample:
        shard, row = self._place(index)
        members = _table(self.tables[shard])[row]
        there = members[members[:, 1] >= 0]
        start, end = int(there[:, 0].min()), int(there.sum(axis=1).max())
        span = _read(self.urls[shard], start, end)  # a sample's members are neighbours: one read for all

        def member(column: int) -> bytes:
            offset, size = (int(x) for x in members[column])
            return span[offset - start : offset - start + size]

        meta = _json(member(_JSON)) if "json." in f"{self.caption_key} {self.label_key}" else {}
        captions = (caption_text(member(_TXT)),) if self.caption_key == "txt" else _captions(meta, self.caption_key)
        label = None if self.label_key is None else _label(member(_CLS), meta, self.label_key)
        return Sample("", member(_IMAGE), captions, label)


def _json(encoded: bytes) -> dict[str, Any]:
    try:
        meta = json.loads(encoded)
    except ValueError:
        raise BadSample("json cannot be read") from None
    if not isinstance(meta, dict):
        raise BadSample("json is not an object")
    return meta


def _captions(meta: dict[str, Any], caption_key: str) -> Sequence[str]:
    value = meta.get(caption_key.removeprefix("json."))
    values = value if isinstance(value, list) else [value]
    captions = [text.strip() for text in values if isinstance(text, str) and text.strip()]
    if not captions:
        raise BadSample(f"caption is missing: {caption_key} holds no text")
    return captions


def _label(cls_member: bytes, meta: dict[str, Any], label_key: str) -> int | str:
    if label_key == "cls":
        text = cls_member.decode("utf-8", "replace").strip()
        if not text:
            raise BadSample("label is missing: there is no cls member")
        return int(text) if text.lstrip("-").isdigit() else text
    value = meta.get(label_key.removeprefix("json."))
    if not isinstance(value, (int, str)):
        raise BadSample(f"label is missing: {label_key} holds none")
    return value


def _read(url: str, start: int, end: int) -> bytes:
    """Bytes [start, end) of a shard. A file that is cut shorter since it was indexed is a bad sample."""
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
        span: bytes = fs.cat_file(path, start=start, end=end)
    except OSError as error:
        raise BadSample(f"shard cannot be read: {error}") from None
    if len(span) < end - start:
        raise BadSample("shard is shorter than its index says")
    return span


# ------------------------------------------------------------------------------------------------ indexing

_Indexed = tuple[str, int, list[tuple[str, str]]]
"""Path of the table, its number of samples, (key, reason) of each sample left out."""


@lru_cache(maxsize=256)
def _table(path: str) -> Table:
    table: Table = np.load(path, mmap_mode="r", allow_pickle=False)
    return table


def _index_all(urls: Sequence[str], caption_key: str) -> list[_Indexed]:
    column = _TXT if caption_key == "txt" else _JSON
    paths = [_table_path(url, column) for url in urls]
    new = [i for i, path in enumerate(paths) if not path.with_suffix(".json").is_file()]
    if new:
        cache_root().joinpath("index").mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(min(len(new), os.cpu_count() or 1)) as pool:
            done = pool.map(_index_shard, [urls[i] for i in new], [str(paths[i]) for i in new], [column] * len(new))
            for _ in track(done, "indexing shards", len(new), disable=not sys.stderr.isatty()):
                pass
    return [_load_index(path) for path in paths]


def _table_path(url: str, column: int) -> Path:
    """In the cache, under a name that changes when the shard does. Raises DataError for a shard that is not there."""
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
        info = fs.info(path)
    except FileNotFoundError:
        raise DataError(f"shard {url} does not exist: check data.shards") from None
    except (OSError, ValueError) as error:
        raise DataError(f"shard {url} cannot be opened: {error}") from None
    if info["type"] == "directory":
        raise DataError(f"shard {url} is a folder: give its tar files, e.g. data.shards='{url}/*.tar'")
    version = info.get("mtime") or info.get("ETag") or info.get("LastModified")
    identity = f"{_INDEX_VERSION} {column} {url if '://' in url else Path(url).resolve()} {info['size']} {version}"
    return cache_root() / "index" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npy"


def _load_index(path: Path) -> _Indexed:
    meta = json.loads(path.with_suffix(".json").read_text())
    return str(path), meta["samples"], [(key, reason) for key, reason in meta["bad"]]


def _index_shard(url: str, table_path: str, column: int) -> None:
    rows, bad = _scan(url, column)
    table = np.asarray(rows, dtype=np.int64).reshape(-1, len(set(_COLUMNS.values())), 2)
    partial_path = f"{table_path}.{os.getpid()}"
    with open(partial_path, "wb") as file:  # noqa: PTH123
        np.save(file, table, allow_pickle=False)
    os.replace(partial_path, table_path)  # noqa: PTH105
    meta_path = Path(table_path).with_suffix(".json")  # written last: it says that the table is whole
    Path(f"{meta_path}.{os.getpid()}").write_text(json.dumps({"samples": len(table), "bad": bad}))
    Path(f"{meta_path}.{os.getpid()}").replace(meta_path)


def _scan(url: str, column: int) -> tuple[list[list[tuple[int, int]]], list[tuple[str, str]]]:
    """The places of the members of each usable sample, and what is left out."""
    import fsspec

    rows: list[list[tuple[int, int]]] = []
    bad: list[tuple[str, str]] = []
    key, members = "", [(0, -1)] * 4

    def close() -> None:
        if members[_IMAGE][1] >= 0 and members[column][1] >= 0:
            rows.append(members)
        elif any(size >= 0 for _, size in members):
            what = "image" if members[_IMAGE][1] < 0 else "caption"
            bad.append((f"{url}:{key}", f"{what} is missing"))

    fs, path = fsspec.core.url_to_fs(url)
    size = fs.size(path)
    with fs.open(path, "rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:  # r: refuses a compressed bomb under the name of a tar
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every header
                    if member.offset_data + member.size > size:
                        raise tarfile.ReadError(f"is cut off inside {member.name}")
                    stem, _, ending = Path(member.name).name.partition(".")
                    name = str(Path(member.name).parent / stem)
                    if not member.isreg() or ending.lower() not in _COLUMNS:
                        continue
                    if name != key:
                        close()
                        key, members = name, [(0, -1)] * 4
                    members[_COLUMNS[ending.lower()]] = (member.offset_data, member.size)
                _check_end(file, tar.offset)
        except tarfile.TarError as error:
            bad.append((url, f"shard {error}; {len(rows)} samples before that are used"))
            members = [(0, -1)] * 4
    close()
    return rows, bad


def _check_end(file: IO[bytes], offset: int) -> None:
    """tarfile takes a damaged or cut header for the end of the archive; a real end is a block of zeros."""
    file.seek(offset)
    block = file.read(512)
    if not block:
        raise tarfile.ReadError("ends without the end-of-archive mark, so it may be cut off")
    if block.strip(b"\0"):
        raise tarfile.ReadError(f"has a damaged or cut header at byte {offset}")
