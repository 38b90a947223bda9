"""WebDataset shards, as img2dataset writes them: jpg (or jpeg, png, webp) + txt + json, read at random by an index.

Opening a data set that was opened before only looks at the shards' sizes and times. Only members on an allow-list are
ever read, and none of them can execute anything.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import tarfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from clipx.config import option
from clipx.data import Dataset, DataSpec
from clipx.data.index import CLS, IMAGE, JSON, TXT, index_shards, load_table
from clipx.data.source import Bad, BadSample, Sample, Source, caption_text, check_share, parse_label, split
from clipx.errors import ConfigError, DataError, require

_GAP = 1 << 16  # bytes between a sample's members that are cheaper to read than a second request


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

    @property
    def published(self) -> int | None:
        return self.samples

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
        return Dataset(train, held_out, None, self.samples)

    def _open(self, pattern: str, key: str) -> Shards:
        return Shards.open(expand(pattern, key), self.caption_key, self.label_key)


def expand(pattern: str, key: str) -> list[str]:
    """Braces, globs and :: to shard URLs, in order. Raises ConfigError where a part of the pattern matches nothing."""
    from braceexpand import braceexpand

    urls: list[str] = []
    try:
        parts = [url for part in pattern.split("::") if part.strip() for url in braceexpand(part.strip())]
    except ValueError as error:
        raise ConfigError(f"{key}={pattern} is no pattern ({error}): write {{0000..0123}} for a range") from None
    for part in parts:
        found = _glob(part)
        require(bool(found), f"{key}={part} matches no shard: check the path, and quote braces and stars in the shell")
        urls += found
    require(bool(urls), f"{key}={pattern} names no shard: give paths of tar files, e.g. {key}='/data/*.tar'")
    twice = [url for url in dict.fromkeys(urls) if urls.count(url) > 1] if len(set(urls)) < len(urls) else []
    require(not twice, f"{key}={pattern} names {', '.join(twice[:3])} twice: name each shard once")
    return urls


def _glob(url: str) -> list[str]:
    import fsspec

    if "://" not in url:
        path = os.path.expanduser(url)  # noqa: PTH111
        return sorted(glob.glob(path)) if glob.has_magic(path) and not Path(path).exists() else [path]  # noqa: PTH207
    if "*" not in url:  # a ? may begin the query of a URL
        return [url]
    try:
        fs, path = fsspec.core.url_to_fs(url)
        return sorted(fs.unstrip_protocol(found) for found in fs.glob(path))
    except Exception as error:  # a remote file system raises what its library does
        raise DataError(f"{url} cannot be listed: {str(error) or type(error).__name__}") from None


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
    _ends: Sequence[int] = field(repr=False)

    @classmethod
    def open(cls, urls: Sequence[str], caption_key: str, label_key: str | None) -> Shards:
        """Indexes what is not indexed yet, with progress. Raises DataError where there is no sample at all."""
        indices = index_shards(urls, TXT if caption_key == "txt" else JSON)
        sizes = [index.samples for index in indices]
        bad = [item for index in indices for item in index.bad]
        if not sum(sizes):
            reasons = f"; {bad[0].key}: {bad[0].reason}" if bad else ""
            raise DataError(
                f"{len(urls)} shards, from {urls[0]}, hold no sample with an image and a caption "
                f"(data.caption_key={caption_key}){reasons}"
            )
        facts = [caption_key, str(label_key), *(index.digest for index in indices)]
        fingerprint = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
        tables = [index.table for index in indices]
        return cls(urls, tables, sizes, bad, fingerprint, caption_key, label_key, list(accumulate(sizes)))

    def _place(self, index: int) -> tuple[int, int]:
        """(shard, row) of a sample."""
        shard = bisect_right(self._ends, index)
        return shard, index - self._ends[shard] + self.sizes[shard]

    def key(self, index: int) -> str:
        shard, row = self._place(index)
        offset = int(load_table(self.tables[shard])[row, IMAGE, 0])
        try:
            header = _fetch((self.urls[shard], self.tables[shard]), offset - 512, 512)
            name = tarfile.TarInfo.frombuf(header, "utf-8", "replace").name
        except (BadSample, tarfile.TarError):
            name = f"sample {row}"
        return f"{self.urls[shard]}:{name}"

    def read(self, index: int) -> Sample:
        shard, row = self._place(index)
        members: list[tuple[int, int]] = load_table(self.tables[shard])[row].tolist()
        wanted = {column: members[column] for column in self._columns() if members[column][1] >= 0}
        contents = _read((self.urls[shard], self.tables[shard]), list(wanted.values()))
        found = dict(zip(wanted, contents, strict=True))
        meta = _json(found.get(JSON, b"")) if JSON in self._columns() else {}
        captions = [caption_text(found[TXT])] if self.caption_key == "txt" else _captions(meta, self.caption_key)
        label = None if self.label_key is None else _label(found.get(CLS, b""), meta, self.label_key)
        return Sample(found[IMAGE], captions, label)

    def _columns(self) -> set[int]:
        named = {"txt": TXT, "cls": CLS, None: IMAGE}
        return {IMAGE, named.get(self.caption_key, JSON), named.get(self.label_key, JSON)}


def _json(encoded: bytes) -> dict[str, Any]:
    try:
        meta = json.loads(encoded)
    except (ValueError, RecursionError):
        raise BadSample("json cannot be read") from None
    if not isinstance(meta, dict):
        raise BadSample("json is not an object")
    return meta


def _captions(meta: dict[str, Any], caption_key: str) -> Sequence[str]:
    """Those that can be used, where there are several."""
    value = meta.get(caption_key.removeprefix("json."))
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    captions, fault = [], f"caption is missing: {caption_key} holds no text"
    for text in texts:
        try:
            captions.append(caption_text(text))
        except BadSample as error:
            fault = str(error)
    if not captions:
        raise BadSample(fault)
    return captions


def _label(cls_member: bytes, meta: dict[str, Any], label_key: str) -> int | str:
    value = cls_member.decode("utf-8", "replace") if label_key == "cls" else meta.get(label_key.removeprefix("json."))
    if isinstance(value, int):
        return int(value)
    if not isinstance(value, str):
        raise BadSample(f"label is missing: {label_key} holds none")
    return parse_label(value)


# ------------------------------------------------------------------------------------------------- reading


def _read(shard: tuple[str, str], spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """The bytes of each (offset, size) of a (url, table): in one request where they are neighbours."""
    start, end = min(offset for offset, _ in spans), max(offset + size for offset, size in spans)
    if end - start > sum(size for _, size in spans) + _GAP:
        return [_fetch(shard, *span) for span in spans]
    whole = _fetch(shard, start, end - start)
    return [whole[offset - start : offset - start + size] for offset, size in spans]


def _fetch(shard: tuple[str, str], offset: int, size: int) -> bytes:
    import fsspec

    try:
        file = _local_file(*shard)
        if file is not None:
            span = os.pread(file.fileno(), size, offset)
        else:
            fs, path = fsspec.core.url_to_fs(shard[0])  # cached there, for each process anew
            span = fs.cat_file(path, start=offset, end=offset + size)
    except Exception as error:  # a remote file system raises what its library does
        raise BadSample(f"shard cannot be read: {str(error) or type(error).__name__}") from None
    if len(span) < size:
        raise BadSample("shard is shorter than its index says")
    return span


@lru_cache(maxsize=128)
def _local_file(url: str, table: str) -> IO[bytes] | None:
    """A shard, open for reading, or None where it is not local. Another table is another version of the shard.

    It stays open because opening costs more than reading a sample, above all on a network's file system.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    fs, path = fsspec.core.url_to_fs(url)
    return Path(path).open("rb", buffering=0) if isinstance(fs, LocalFileSystem) else None
