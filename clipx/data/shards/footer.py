"""Footers of Parquet files: the columns, and the place and number of rows of each row group. No row is read for it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.data.parquet_file import ENCRYPTED, FIX, MAGIC, open_parquet
from clipx.data.shards.index import file_version
from clipx.errors import DataError
from clipx.storage.failure import error_text
from clipx.storage.files import errors_as
from clipx.storage.local import cache_folder, write_bytes
from clipx.storage.remote import read_range
from clipx.storage.safe_json import read_regular

if TYPE_CHECKING:
    from pyarrow import Schema
    from pyarrow.parquet import FileMetaData

_TAIL = 1 << 16  # bytes at the end of a file that are requested first
_END = 8  # bytes at the end: the length of the footer, then the magic number
_LARGEST = 1 << 32  # bytes of a footer, whose length has four


@dataclass(frozen=True, slots=True)
class ParquetFile:
    """A Parquet file. `footer` is the path of a copy of its footer."""

    url: str
    size: int
    digest: str
    """Digest of the footer, which describes each column of each row group."""

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
        """Returns (rows, bytes without compression of the columns `names`) of each row group.

        Raises DataError if a column is encrypted, or lies outside the file.
        """
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


def open_parquet_file(url: str, retry_s: float) -> ParquetFile:
    """Reads the footer of a file, or the copy of an earlier run. Raises DataError if it is not a complete Parquet file.

    Costs a look-up, and on first use one request, or two for a footer above 64 KiB.
    """
    version, size = file_version(url, (), retry_s)
    copy = cache_folder("index") / f"{version}.footer"
    try:
        footer = read_regular(copy, _LARGEST)
    except OSError:
        with errors_as(DataError, f"{url} cannot be read", "check the URL and the permission to read it"):
            footer = _read_footer(url, size, retry_s)
        write_bytes(copy, footer)
    file = ParquetFile(url, size, hashlib.sha256(b"%d " % size + footer).hexdigest()[:32], str(copy))
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
