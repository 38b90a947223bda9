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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, compress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from clipx.data.csv import check_columns
from clipx.data.shards.cache import Access, ShardFile, Span, read_cached, store_now
from clipx.data.shards.first_use import ShardSet
from clipx.data.shards.footer import ParquetFile, leaf_columns, open_parquet_file
from clipx.data.shards.index import FoundShard, Row, ShardIndex
from clipx.data.shards.shards import Shards
from clipx.data.shards.tar import JSON
from clipx.data.source import MAX_BYTES, MAX_TEXT, BadRecord, held_shards
from clipx.errors import DataError, require
from clipx.storage.failure import error_text
from clipx.storage.local import cache_folder
from clipx.storage.remote import BLOCK, REQUESTS, read_range

if TYPE_CHECKING:
    from pyarrow import DataType, Schema

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
    def texts(self) -> tuple[str, ...]:
        """Columns of captions and labels."""
        return (*(name for name, _ in self.captions), *([] if self.label is None else [self.label]))

    def check(self, url: str, schema: Schema) -> None:
        """Raises ConfigError if a column is missing or has values of another type."""
        for name in [name for name, _ in self.captions] or [self.image]:
            check_columns(url, schema.names, (self.image, name, self.label), "data")
        kind = schema.field(self.image).type
        require(
            is_image(kind),
            f"data.image_column={self.image} of {url} holds {kind}, not the bytes of images: for paths use data=csv, "
            "or name the column with the bytes",
        )
        for name, _ in self.captions:
            kind = schema.field(name).type
            require(
                is_text(kind) or is_list_of_text(kind),
                f"data.caption_column={name} of {url} holds {kind}, not texts or lists of texts: name another column",
            )
        if self.label is not None:
            kind = schema.field(self.label).type
            require(
                is_text(kind) or _is_index(kind),
                f"data.label_column={self.label} of {url} holds {kind}, neither indices nor names: name another column",
            )


def is_image(kind: DataType) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and is_image(kind.field("bytes").type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def is_text(kind: DataType) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind))


def is_list_of_text(kind: DataType) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind)) and is_text(kind.value_type)


def _is_index(kind: DataType) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_boolean(kind))


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
        for number, cells in enumerate(self._rows()):
            image = cells[self.columns.image]
            image = image["bytes"] if isinstance(image, dict) else image
            text = json.dumps({name: cells[name] for name in self.columns.texts}).encode()
            if fault := self._fault(image, cells, len(text)):
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

    def _fault(self, image: bytes | None, cells: dict[str, Any], text_bytes: int) -> str | None:
        """Returns the reason why a row is unusable, or None."""
        captions = [cells[name] for name, _ in self.columns.captions]
        if not image:
            return "image is missing or empty"
        if captions and not any(any(cell) if isinstance(cell, list) else cell for cell in captions):
            return "caption is missing or empty"
        if self.columns.label is not None and cells[self.columns.label] in (None, ""):
            return "label is missing"
        for size, what, limit in ((len(image), "image", MAX_BYTES), (text_bytes, "caption", MAX_TEXT)):
            if size > limit:
                return f"{what} is larger than {limit >> 20} MiB"
        return None

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yields the cells of each row by column. Requests the needed columns in blocks of at most 16 MiB."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        reader = _RangeReader(self.file.url, self.file.size, self.access.retry_s)
        try:
            metadata = self.file.metadata()
            names = _leaves(metadata.schema.to_arrow_schema(), self.columns)
            leaves = [path for path, _ in leaf_columns(metadata, self.group, names)]
            # pyarrow's types say Path or file; it takes any object with these methods
            parquet = pq.ParquetFile(pa.PythonFile(reader, "r"), metadata=metadata, buffer_size=BLOCK, pre_buffer=False)
            for batch in parquet.iter_batches(_BATCH, row_groups=[self.group], columns=leaves, use_threads=False):
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError, ValueError) as error:
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


class _RangeReader(io.RawIOBase):
    """File object for pyarrow that reads ranges with retries. `failure`: the error of the last read."""

    def __init__(self, url: str, size: int, retry_s: float) -> None:
        super().__init__()
        self._url, self._size, self._retry_s, self._position = url, size, retry_s, 0
        self.failure: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

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
            metadata = file.metadata()
            schema = metadata.schema.to_arrow_schema()
            columns.check(file.url, schema)
            names = _leaves(schema, columns)
            for k in range(metadata.num_row_groups):
                if rows := metadata.row_group(k).num_rows:
                    size = sum(size for _, size in leaf_columns(metadata, k, names))
                    groups.append((number, k, rows, max(1, size)))
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
