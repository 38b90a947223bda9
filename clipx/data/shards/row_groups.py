"""Parquet files that contain images, as shards: a row group is read whole, like a tar, on its first use.

The needed columns of a row group are written into the cache, image and text of each row next to each other, with a
table of their offsets as the index of a tar has. Everything after that is the code of tars. The text is a JSON object
{column: value}, so that captions and labels are keys of it, as in the json member of a tar.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, compress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from clipx.data.csv import check_columns
from clipx.data.parquet_file import IMAGE, check_rows, open_parquet, rows, texts_of
from clipx.data.shards.cache import Access, ShardFile, Span, read_cached, store_now
from clipx.data.shards.first_use import ShardSet
from clipx.data.shards.footer import ParquetFile, SizedFile, open_parquet_file
from clipx.data.shards.index import JSON, FoundShard, Row, ShardIndex
from clipx.data.shards.shards import Shards
from clipx.data.source import MAX_BYTES, MAX_TEXT, BadRecord, held_shards
from clipx.errors import DataError
from clipx.storage.failure import error_text
from clipx.storage.local import cache_folder
from clipx.storage.remote import BLOCK, REQUESTS, read_range

if TYPE_CHECKING:
    from pyarrow import Schema

_BATCH = 64  # rows decoded at a time
_MISSING = (0, -1)
_VERSION = 1  # of the cached files


class UnreadableGroup(DataError):
    """A row group cannot be read: it is damaged, or its file has changed or does not exist."""


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Names of the columns of images, captions and labels. Captions have weights; without any, a sample has none."""

    image: str
    captions: tuple[tuple[str, float], ...]
    label: str | None

    @property
    def named(self) -> tuple[str, list[str], str | None]:
        """Names of the columns: see clipx.data.parquet_file."""
        return self.image, [name for name, _ in self.captions], self.label

    @property
    def texts(self) -> tuple[str, ...]:
        """Columns of captions and labels."""
        return (*(name for name, _ in self.captions), *([] if self.label is None else [self.label]))

    def check(self, url: str, schema: Schema) -> None:
        """Raises ConfigError if a column is missing or has values of another type."""
        for name in [name for name, _ in self.captions] or [self.image]:
            check_columns(url, schema.names, (self.image, name, self.label), "data")
        fix = "for paths use data=csv, or name the column with the bytes"
        check_rows(schema, self.named, IMAGE, url, "data", fix)


@dataclass(frozen=True, slots=True)
class RowGroupFile(ShardFile):
    """The file of a row group in the cache. `size` is an estimate."""

    file: ParquetFile
    group: int
    columns: RowColumns

    @property
    def local(self) -> bool:
        return False  # the file that is read is in the cache

    @property
    def cacheable(self) -> bool:
        return True

    @property
    def found(self) -> FoundShard:
        """The index of the cached file."""
        return FoundShard(self.url, cache_folder("index") / f"{self.version}.npy", self.size)

    def write(self, out: IO[bytes]) -> None:
        """Writes the content of the cached file, and its index. Raises UnreadableGroup, DataError or OSError."""
        table, bad = list[Row](), list[BadRecord]()
        for number, (image, captions, label) in enumerate(self._rows()):
            labels = {} if self.columns.label is None else {self.columns.label: label}
            text = json.dumps({**captions, **labels}).encode()
            if fault := self._fault(image, captions, label, len(text)):
                bad.append(BadRecord(f"{self.url}:{number}", fault))
                table.append([_MISSING] * 4)
                continue
            row = [_MISSING] * 4
            row[0], row[JSON] = (out.tell(), len(image)), (out.tell() + len(image), len(text))
            out.write(image)
            out.write(text)
            table.append(row)
        if not self.found.indexed:
            self.found.save(table, self.version[:16], bad)

    def _fault(
        self, image: bytes | None, captions: Mapping[str, Any], label: int | str | None, text_bytes: int
    ) -> str | None:
        """Returns the reason why a row is unusable, or None."""
        if not image:
            return "image is missing or empty"
        if captions and not any(map(texts_of, captions.values())):
            return "caption is missing or empty"
        if self.columns.label is not None and label in (None, ""):
            return "label is missing"
        for size, what, limit in ((len(image), "image", MAX_BYTES), (text_bytes, "caption", MAX_TEXT)):
            if size > limit:
                return f"{what} is larger than {limit >> 20} MiB"
        return None

    def _rows(self) -> Iterator[tuple[Any, Mapping[str, Any], int | str | None]]:
        """Yields (image, captions by column, label) of each row. Requests the columns in blocks of at most 16 MiB."""
        import pyarrow as pa

        reader = _RangeReader(self.file.url, self.file.size, self.access.retry_s)
        try:
            metadata = self.file.metadata()
            leaves = self.file.leaves(_leaves(self.file.schema(), self.columns))
            file = open_parquet(pa.PythonFile(reader, "r"), self.url, metadata=metadata, buffer_size=BLOCK)
            for batch in file.iter_batches(_BATCH, row_groups=[self.group], columns=leaves, use_threads=False):
                yield from rows(batch, self.columns.named)
        except Exception as error:  # pyarrow raises errors of many types on damaged pages
            if isinstance(reader.failure, DataError):
                raise reader.failure from None
            raise UnreadableGroup(f"cannot be read ({error_text(reader.failure or error)})") from None

    def read_uncached(self, span: Span) -> bytes:
        """Reads a span after storing the row group again; from memory if it cannot be stored."""
        store_now(self)
        stored = read_cached(self, span)
        return _content(self)[span[0] : span[0] + span[1]] if stored is None else stored


@lru_cache(maxsize=1)
def _content(file: RowGroupFile) -> bytes:
    out = io.BytesIO()
    file.write(out)
    return out.getvalue()


class _RangeReader(SizedFile):
    """File object for pyarrow that reads ranges with retries. `failure`: the error of the last read."""

    def __init__(self, url: str, size: int, retry_s: float) -> None:
        super().__init__(size)
        self._url, self._retry_s = url, retry_s
        self.failure: Exception | None = None

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._size, self._position + size)
        try:
            content = read_range(self._url, self._position, end, self._retry_s, patient=True)
        except Exception as error:  # a remote file system raises the exceptions of its library
            self.failure = error
            raise OSError from None
        self._position += len(content)
        return content


@dataclass(frozen=True, slots=True)
class RowGroupSet(ShardSet):
    """First use of row groups: each is stored in the cache."""

    files: Sequence[ParquetFile] = ()
    columns: RowColumns = RowColumns("", (), None)
    numbers: dict[str, tuple[int, int, int]] = field(default_factory=dict, repr=False)
    """(number of the file, number of the row group, estimated bytes) by URL."""

    def file(self, url: str, index: ShardIndex | None = None) -> RowGroupFile:
        number, group, size = self.numbers[url]
        file = self.files[number]
        identity = f"{_VERSION} {file.digest} {file.footer} {group} {self.columns.image} {self.columns.texts}"
        version = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return RowGroupFile(url, version, size, self.access, file, group, self.columns)

    def name(self, url: str, index: ShardIndex, row: int) -> str:
        return str(row)

    def _prepare(self, url: str, record: Path) -> ShardIndex:
        file = self.file(url)
        try:
            store_now(file)
            if not file.found.indexed:  # it could not be stored, or only the index was removed
                _content(file)
        except UnreadableGroup as error:
            return ShardIndex("", 0, "", [BadRecord(url, f"row group {error}")], (), 0)
        return file.found.load()


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Row groups of Parquet files: number of the file, number in the file, rows and estimated bytes in the cache."""

    files: Sequence[ParquetFile]
    columns: RowColumns
    groups: Sequence[tuple[int, int, int, int]]
    starts: Sequence[int] = ()
    """Number of the first sample of each row group among all samples, if some are held out."""

    @classmethod
    def find(cls, urls: Sequence[str], columns: RowColumns, retry_s: float) -> RowGroups:
        """Reads the footers of all files. Raises ConfigError for a missing column, and DataError."""
        with ThreadPoolExecutor(REQUESTS) as pool:  # a remote request takes about 50 ms
            files = list(pool.map(partial(open_parquet_file, retry_s=retry_s), urls))
        groups = []
        for number, file in enumerate(files):
            schema = file.schema()
            columns.check(file.url, schema)
            sizes = file.group_sizes(_leaves(schema, columns))
            groups += [(number, k, rows, max(1, size)) for k, (rows, size) in enumerate(sizes) if rows]
        if not groups:
            raise DataError(f"{len(urls)} Parquet files, from {urls[0]}, have no row: give files with images")
        return cls(files, columns, groups)

    def split(self, share: float) -> tuple[RowGroups, RowGroups | None]:
        """Holds out a share of the row groups, evenly spread; None if that is less than one of them."""
        held = held_shards(self.groups, share)
        if not any(held):
            return self, None
        kept = [not out for out in held]
        starts = list(accumulate((rows for _, _, rows, _ in self.groups), initial=0))
        one, other = (
            replace(self, groups=list(compress(self.groups, chosen)), starts=list(compress(starts, chosen)))
            for chosen in (kept, held)
        )
        return one, other

    def open(self, access: Access) -> Shards:
        """Returns the source over the row groups."""
        urls = [f"{self.files[number].url}#{k}" for number, k, _, _ in self.groups]
        facts = [f"{self.files[number].digest} {k}" for number, k, _, _ in self.groups]
        facts += [self.columns.image, *self.columns.texts]
        digest = hashlib.sha256("\n".join(facts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        sizes = [rows for _, _, rows, _ in self.groups]
        lengths = [size for *_, size in self.groups]
        numbers = {url: (number, k, size) for url, (number, k, _, size) in zip(urls, self.groups, strict=True)}
        return Shards(
            urls=urls,
            remote=True,
            sizes=sizes,
            bad=[],
            notes=[],
            fingerprint=digest,
            captions={f"json.{name}": weight for name, weight in self.columns.captions},
            label_key=None if self.columns.label is None else f"json.{self.columns.label}",
            lengths=lengths,
            listed_by="the footer",
            starts=self.starts,
            _set=RowGroupSet((JSON,), access, time.time(), {}, self.files, self.columns, numbers),
            _ends=list(accumulate(sizes)),
        )


def _leaves(schema: Schema, columns: RowColumns) -> list[str]:
    """Returns the columns to read: of a struct {bytes, path} the bytes only."""
    from pyarrow import types

    image = f"{columns.image}.bytes" if types.is_struct(schema.field(columns.image).type) else columns.image
    return [image, *columns.texts]
