"""Parquet files that contain images, as shards: a row group is read whole, like a tar, on its first use.

The needed columns of a row group are written into the cache, image and text of each row next to each other, with a
table of their offsets as the index of a tar has. Everything after that is the code of tars. The text is a JSON object
{column: value}, so that captions and labels are keys of it, as in the json member of a tar.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, compress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from clipx.data import parquet_file
from clipx.data.csv import check_columns
from clipx.data.loader_process import this_process
from clipx.data.parquet_file import ENCRYPTED, FIX, MAGIC, check_rows, open_parquet, rows, texts_of
from clipx.data.shards.cache import Access, read_cached, store_now
from clipx.data.shards.index import IMAGE, JSON, MISSING, RowSpans, Span, UnreadableShard, file_version
from clipx.data.shards.shard import Shard
from clipx.data.shards.shards import Shards
from clipx.data.source import MAX_BYTES, MAX_TEXT, BadRecord, BadSample, held_shards
from clipx.errors import DataError
from clipx.storage.failure import error_text
from clipx.storage.files import errors_as
from clipx.storage.local import cache_folder, write_bytes
from clipx.storage.remote import BLOCK, REQUESTS, read_range
from clipx.storage.safe_json import read_regular

if TYPE_CHECKING:
    from pyarrow import Schema
    from pyarrow.parquet import FileMetaData


_BATCH = 64  # rows decoded at a time
_VERSION = 1  # of the cached files


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
        check_rows(schema, self.named, parquet_file.IMAGE, url, "data", fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup(Shard):
    """A row group of a Parquet file. `size` is an estimate of that of its file in the cache, which is what is read."""

    file: ParquetFooter
    group: int
    columns: RowColumns

    @classmethod
    def of(cls, file: ParquetFooter, group: int, size: int, columns: RowColumns, access: Access) -> Self:
        identity = f"{_VERSION} {file.digest} {file.footer} {group} {columns.image} {columns.texts}"
        version = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return cls(
            f"{file.url}#{group}",
            (JSON,),
            access,
            size,
            str(cache_folder("index") / f"{version}.npy"),
            file=file,
            group=group,
            columns=columns,
        )

    @property
    def local(self) -> bool:
        return False  # the file that is read is in the cache

    def _index(self) -> None:
        self._unstored()  # it could not be stored, or only the index was removed

    def name(self, row: int) -> str:
        return str(row)

    def members(self, row: int, columns: Iterable[int]) -> dict[int, Span]:
        members = Shard.members(self, row, columns)
        if not members:  # of a bad row
            reasons = {record.key: record.reason for record in self.bad}
            raise BadSample(reasons[f"{self.url}:{row}"])
        return members

    def fetch_remote(self, span: Span) -> bytes:
        """Reads a span after storing the row group again; from memory if it cannot be stored."""
        content = read_cached(self.cache_path, span)
        if content is None:
            store_now(self)
            content = read_cached(self.cache_path, span)
        return self._unstored()[span[0] : sum(span)] if content is None else content

    def _unstored(self) -> bytes:
        """Returns the content of the cached file. A process keeps that of one row group."""
        process = this_process()
        version, content = process.unstored
        if version != self.version:
            out = io.BytesIO()
            self.write(out)
            content = out.getvalue()
            process.unstored = (self.version, content)
        return content

    def write(self, out: IO[bytes]) -> None:
        """Writes the content of the cached file, and its index. Raises UnreadableShard, DataError or OSError."""
        table, bad = list[RowSpans](), list[BadRecord]()
        for number, (image, captions, label) in enumerate(self._rows()):
            labels = {} if self.columns.label is None else {self.columns.label: label}
            text = json.dumps({**captions, **labels}).encode()
            row = [MISSING] * 4
            table.append(row)
            if fault := self._fault(image, captions, label, len(text)):
                bad.append(BadRecord(f"{self.url}:{number}", fault))
                continue
            row[IMAGE], row[JSON] = (out.tell(), len(image)), (out.tell() + len(image), len(text))
            out.write(image)
            out.write(text)
        if not self.indexed:
            self.save(table, self.version[:16], bad)

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

        read = partial(read_range, self.file.url, retry_s=self.access.retry_s, patient=True)
        leaves = self.file.leaves(_leaves(self.file.schema(), self.columns))
        opened = pa.PythonFile(RangeFile(self.file.size, read), "r")
        file = open_parquet(opened, self.url, metadata=self.file.metadata(), buffer_size=BLOCK)
        try:
            for batch in file.iter_batches(_BATCH, row_groups=[self.group], columns=leaves, use_threads=False):
                yield from rows(batch, self.columns.named)
        except DataError:
            raise
        except Exception as error:  # pyarrow raises errors of many types on damaged pages
            raise UnreadableShard(f"row group cannot be read ({error_text(error)})") from None


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Row groups of Parquet files: (file, number in the file, rows, estimated bytes in the cache) of each."""

    columns: RowColumns
    groups: Sequence[tuple[ParquetFooter, int, int, int]]
    starts: Sequence[int] = ()  # number of the first sample of each row group among all samples, if some are held out

    @classmethod
    def find(cls, urls: Sequence[str], columns: RowColumns, retry_s: float) -> Self:
        """Reads the footers of all files. Raises ConfigError for a missing column, and DataError."""
        with ThreadPoolExecutor(REQUESTS) as pool:  # a remote request takes about 50 ms
            files = list(pool.map(partial(open_parquet_file, retry_s=retry_s), urls))
        groups = []
        for file in files:
            schema = file.schema()
            columns.check(file.url, schema)
            sizes = file.group_sizes(_leaves(schema, columns))
            groups += [(file, k, rows, max(1, size)) for k, (rows, size) in enumerate(sizes) if rows]
        if not groups:
            raise DataError(f"{len(urls)} Parquet files, from {urls[0]}, have no row: give files with images")
        return cls(columns, groups)

    def split(self, share: float) -> tuple[Self, Self | None]:
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
        facts = [f"{file.digest} {k}" for file, k, _, _ in self.groups]
        facts += [self.columns.image, *self.columns.texts]
        return Shards(
            shards=[RowGroup.of(file, k, size, self.columns, access) for file, k, _, size in self.groups],
            sizes=[rows for _, _, rows, _ in self.groups],
            bad=[],
            notes=[],
            fingerprint=hashlib.sha256("\n".join(facts).encode("utf-8", "surrogatepass")).hexdigest()[:16],
            captions={f"json.{name}": weight for name, weight in self.columns.captions},
            label_key=None if self.columns.label is None else f"json.{self.columns.label}",
            listed_by="the footer",
            starts=self.starts,
        )


def _leaves(schema: Schema, columns: RowColumns) -> list[str]:
    """Returns the columns to read: of a struct {bytes, path} the bytes only."""
    from pyarrow import types

    image = f"{columns.image}.bytes" if types.is_struct(schema.field(columns.image).type) else columns.image
    return [image, *columns.texts]


# ------------------------------------------------------------------------------------------------------ footers


_TAIL = 1 << 16  # bytes at the end of a file that are requested first
_END = 8  # bytes at the end: the length of the footer, then the magic number
_LARGEST = 1 << 32  # bytes of a footer, whose length has four


@dataclass(frozen=True, slots=True)
class ParquetFooter:
    """A Parquet file of which the footer has been read. `footer`: path of a copy of it."""

    url: str
    size: int
    digest: str  # digest of the footer, which describes each column of each row group
    footer: str

    def metadata(self) -> FileMetaData:
        """Returns the parsed footer."""
        return _metadata(self.footer)

    def schema(self) -> Schema:
        """Returns the columns. Raises DataError if they are damaged."""
        with errors_as(DataError, f"{self.url} has a damaged footer", FIX):
            return self.metadata().schema.to_arrow_schema()

    def leaves(self, names: Sequence[str]) -> list[str]:
        """Returns the paths in the file of the columns that belong to `names`."""
        schema = self.metadata().schema
        paths = [schema.column(k).path for k in range(len(schema))]
        return [path for path in paths if any(path == name or path.startswith(f"{name}.") for name in names)]

    def group_sizes(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """Returns (rows, bytes without compression of the columns `names`) of each row group. Raises DataError if a
        column is encrypted, or lies outside the file."""
        import pyarrow as pa

        metadata, leaves = self.metadata(), self.leaves(names)
        # pyarrow ends the process when it is asked for a column that is encrypted or has lost its description: one in
        # 600 damaged footers. Its reader raises an error for the same column, before it reads any byte of the file.
        unread = pa.PythonFile(RangeFile(self.size, _refuse), "r")
        reader = open_parquet(unread, self.url, metadata=metadata, pre_buffer=True)
        with errors_as(DataError, f"{self.url} cannot be read as Parquet", FIX), suppress(_Asked):
            reader.read_row_groups(list(range(metadata.num_row_groups)), columns=leaves, use_threads=False)
        chosen = [k for k in range(len(metadata.schema)) if metadata.schema.column(k).path in set(leaves)]
        groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
        return [(group.num_rows, sum(group.column(k).total_uncompressed_size for k in chosen)) for group in groups]


def open_parquet_file(url: str, retry_s: float) -> ParquetFooter:
    """Reads the footer of a file, or the copy of an earlier run. Raises DataError if it is not a complete Parquet
    file."""
    version, size = file_version(url, (), retry_s)
    copy = cache_folder("index") / f"{version}.footer"
    try:
        footer = read_regular(copy, _LARGEST)
    except OSError:
        with errors_as(DataError, f"{url} cannot be read", "check the URL and the permission to read it"):
            footer = _read_footer(url, size, retry_s)
        write_bytes(copy, footer)
    file = ParquetFooter(url, size, hashlib.sha256(b"%d " % size + footer).hexdigest()[:32], str(copy))
    try:
        file.metadata()
    except Exception as error:  # pyarrow raises OSError, ValueError and others on damaged footers
        raise DataError(f"{url} has a damaged footer ({error_text(error)}): copy or download it again") from None
    return file


def _read_footer(url: str, size: int, retry_s: float) -> bytes:
    tail = read_range(url, max(0, size - _TAIL), size, retry_s)
    length = int.from_bytes(tail[-_END:-4], "little")
    if tail[-4:] == ENCRYPTED:
        raise DataError(f"{url} has an encrypted footer: {FIX}")
    if tail[-4:] != MAGIC or size < _END + len(MAGIC) or length > size - _END - len(MAGIC):
        whole = size >= len(MAGIC) and read_range(url, 0, len(MAGIC), retry_s) == MAGIC
        raise DataError(
            f"{url} is cut off: it begins as a Parquet file and has no footer at its end; copy or download it again"
            if whole
            else f"{url} is not a Parquet file: give files that contain images, e.g. data.path='train-*.parquet'"
        )
    start = size - _END - length
    if length + _END > len(tail):
        tail = read_range(url, start, size - len(tail), retry_s) + tail
    return tail[-_END - length :]


@lru_cache(maxsize=64)
def _metadata(footer: str) -> FileMetaData:
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pq.read_metadata(pa.BufferReader(MAGIC + Path(footer).read_bytes()))


class RangeFile(io.RawIOBase):
    """File object for pyarrow, of a known size. `read_range(start, end)` returns bytes of it."""

    def __init__(self, size: int, read_range: Callable[[int, int], bytes]) -> None:
        super().__init__()
        self._size, self._read_range, self._position = size, read_range, 0

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
        content = self._read_range(self._position, end)
        self._position += len(content)
        return content


class _Asked(Exception):
    """A byte of a file was asked for."""


def _refuse(_start: int, _end: int) -> bytes:
    raise _Asked
