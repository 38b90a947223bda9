"""Footers of Parquet files: the columns, and the place and number of rows of each row group. No row is read for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.data.shards.index import find_shard
from clipx.errors import DataError
from clipx.storage.failure import error_text
from clipx.storage.local import write_atomically
from clipx.storage.remote import errors_as, read_range

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

MAGIC = b"PAR1"
_TAIL = 1 << 16  # bytes at the end of a file that are requested first
_END = 8  # bytes at the end: the length of the footer, then the magic number


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


def open_parquet_file(url: str, retry_s: float) -> ParquetFile:
    """Reads the footer of a file, or the copy of an earlier run. Raises DataError if it is not a complete Parquet file.

    Costs a look-up, and on first use one request, or two for a footer above 64 KiB.
    """
    found = find_shard((), retry_s, url)
    copy = found.table.with_suffix(".footer")
    try:
        footer = copy.read_bytes()
    except OSError:
        with errors_as(DataError, f"{url} cannot be read", "check the URL and the permission to read it"):
            footer = _read_footer(url, found.size, retry_s)
        write_atomically(copy, lambda path: Path(path).write_bytes(footer))
    file = ParquetFile(url, found.size, hashlib.sha256(b"%d " % found.size + footer).hexdigest()[:32], str(copy))
    try:
        file.metadata()
    except Exception as error:  # pyarrow raises OSError, ValueError and others on damaged footers
        raise DataError(f"{url} has a damaged footer ({error_text(error)}): copy or download it again") from None
    return file


def _read_footer(url: str, size: int, retry_s: float) -> bytes:
    tail = read_range(url, max(0, size - _TAIL), size, retry_s)
    length = int.from_bytes(tail[-_END:-4], "little")
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


def leaf_columns(metadata: FileMetaData, group: int, names: Sequence[str]) -> list[tuple[str, int]]:
    """Returns (path in the schema, bytes without compression) of the columns of a row group that belong to `names`."""
    rows = metadata.row_group(group)
    columns = [rows.column(k) for k in range(rows.num_columns)]
    return [
        (column.path_in_schema, column.total_uncompressed_size)
        for column in columns
        if any(column.path_in_schema == name or column.path_in_schema.startswith(f"{name}.") for name in names)
    ]
