"""Images and captions as one has them: tables of paths, Parquet with the images inside, folders. `prepare` reads them.

A source is a list of pieces, one for each file, whose samples follow each other. A piece is small and goes to another
process, which opens the file: so memory does not grow with the number of files.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from clipx.data.csv import CaptionTable, Columns, check_columns
from clipx.data.shards.remote import sequential
from clipx.data.shards.urls import expand
from clipx.data.source import MAX_BYTES, MAX_TEXT, BadRecord, BadSample, Sample, caption_text, parse_label, read_bounded
from clipx.errors import DataError, require
from clipx.storage.remote import REQUESTS, file_system, is_local, local_path, persist, refusals_as, said

if TYPE_CHECKING:
    from pyarrow import Schema
    from pyarrow.parquet import ParquetFile

Found = tuple[str, Sample | BadSample]
"""Where it comes from, and what it is."""

IMAGES = (".jpg", ".jpeg", ".png", ".webp")
TABLES = (".csv", ".tsv", ".parquet")
_PARQUET = b"PAR1"
_FOOTER = 1 << 16  # bytes that Parquet's own reader asks for at the end of a file


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How files are read: the options of `prepare` that say so."""

    columns: Columns
    separator: str | None
    retry_s: float


class SampleRange:
    """Consecutive samples of a file."""

    def __len__(self) -> int:
        raise NotImplementedError

    def part(self, start: int, stop: int) -> SampleRange:
        raise NotImplementedError

    def samples(self) -> Iterator[Found]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _RowRange(SampleRange):
    """Rows of a table from `start` to before `stop`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Self:
        return replace(self, start=self.start + start, stop=self.start + stop)


@dataclass(frozen=True, slots=True)
class RawSource:
    """A source: its pieces, the rows that are no samples, and what tells it from others."""

    pieces: Sequence[SampleRange]
    bad: Sequence[BadRecord]
    fingerprint: str

    def shards(self, size: int) -> list[list[SampleRange]]:
        """The samples of all pieces, cut every `size` of them."""
        shards: list[list[SampleRange]] = []
        room = 0
        for piece in self.pieces:
            start = 0
            while start < len(piece):
                if room == 0:
                    shards.append([])
                    room = size
                stop = min(len(piece), start + room)
                shards[-1].append(piece.part(start, stop))
                room -= stop - start
                start = stop
        return shards


def open_raw(source: str, how: ReadOptions) -> RawSource:
    """`source` is a path, pattern, @list or URL, of tables or folders; several are joined by ::.

    Raises ConfigError and DataError for what cannot be read in any of them, before a sample of one is.
    """
    found = [item for place in expand(source, "source", "file") for item in _list_files(place)]
    with ThreadPoolExecutor(REQUESTS) as pool:  # a remote file answers after some 50 ms
        looked_at = list(pool.map(partial(_inspect, how=how), found))
    # Tables of paths one by one, for each is read whole.
    opened = [one or _rows(str(item), how) for item, one in zip(found, looked_at, strict=True)]
    digest = hashlib.sha256("\n".join(one.fingerprint for one in opened).encode()).hexdigest()[:16]
    return RawSource(
        [piece for one in opened for piece in one.pieces], [bad for one in opened for bad in one.bad], digest
    )


def _list_files(place: str) -> Sequence[str | CaptionedImages]:
    """The images of a folder, or else its tables; what is no folder, as it is."""
    if not is_local(place) or not Path(local_path(place)).is_dir():
        return [place]
    paths = [str(path) for path in Path(local_path(place)).rglob("*") if path.is_file()]
    images, tables = (sorted(p for p in paths if p.lower().endswith(endings)) for endings in (IMAGES, TABLES))
    require(bool(images or tables), f"source={place} holds no {', '.join(IMAGES + TABLES)}: give a folder that does")
    if images and tables:
        told = f"{place} holds images: its {len(tables):,} tables are not read; to read them instead, name them"
        print(told, file=sys.stderr)
    return [CaptionedImages(images)] if images else tables


def _inspect(found: str | CaptionedImages, how: ReadOptions) -> RawSource | None:
    """None of what has to be read to be counted."""
    if isinstance(found, str):
        return _records(found, how)
    names = "\n".join(found.images).encode("utf-8", "surrogateescape")
    return RawSource([found], [], hashlib.sha256(names).hexdigest())


# --------------------------------------------------------------------------------------------- tables of paths


@lru_cache(maxsize=1)
def _table(path: str, how: ReadOptions, time: int) -> CaptionTable:
    """A process keeps the last one. Of a single table that is the parent's, whose memory forked processes share."""
    table = CaptionTable.open(path, "source", how.separator, how.columns)
    if _time(path) != time:
        raise DataError(f"source={path} changes while it is read: start again when it is whole")
    return table


def _time(path: str) -> int:
    return Path(path).stat().st_mtime_ns


def _rows(place: str, how: ReadOptions) -> RawSource:
    path, time = local_path(place), _time(local_path(place))
    table = _table(path, how, time)
    return RawSource([TableRows(0, len(table.images), path, how, time)], table.bad, table.fingerprint)


@dataclass(frozen=True, slots=True)
class TableRows(_RowRange):
    """Images of a table of paths; rows that name the same image are its captions."""

    path: str
    how: ReadOptions
    time: int

    def samples(self) -> Iterator[Found]:
        table = _table(self.path, self.how, self.time)
        for index in range(self.start, self.stop):
            try:
                yield table.key(index), table.read(index)
            except BadSample as fault:
                yield table.key(index), fault


# ---------------------------------------------------------------------------------------------------- folders


@dataclass(frozen=True, slots=True)
class CaptionedImages(SampleRange):
    """Images with their captions beside them; a line of the text is a caption."""

    images: Sequence[str]

    def __len__(self) -> int:
        return len(self.images)

    def part(self, start: int, stop: int) -> CaptionedImages:
        return CaptionedImages(self.images[start:stop])

    def samples(self) -> Iterator[Found]:
        for image in self.images:
            try:
                captions = _lines(_bounded(f"{image.rpartition('.')[0]}.txt", "caption", MAX_TEXT))
                yield image, Sample(_bounded(image, "image", MAX_BYTES), captions)
            except BadSample as fault:
                yield image, fault


def _bounded(path: str, what: str, most: int) -> bytes:
    try:
        return read_bounded(path, what, most)
    except FileNotFoundError:
        raise BadSample(f"{what} is missing") from None
    except OSError as error:
        raise BadSample(f"{what} cannot be read: {error.strerror}") from None


def _lines(encoded: bytes) -> list[str]:
    return [line.strip() for line in caption_text(encoded).splitlines() if line.strip()]


# ------------------------------------------------------------------------------------ Parquet with images inside


@dataclass(frozen=True, slots=True)
class ParquetRows(_RowRange):
    """Rows of a Parquet file with images inside; `size` is the file's, in bytes."""

    url: str
    size: int
    how: ReadOptions

    def samples(self) -> Iterator[Found]:
        for number, cells in enumerate(self._cells(), start=self.start):
            key = f"{self.url}:{number + 1}"
            try:
                yield key, self._sample(cells)
            except BadSample as fault:
                yield key, fault

    def _cells(self) -> Iterator[dict[str, Any]]:
        """Only the row groups that hold the rows are read, a few rows at a time."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with sequential(self.url, self.size, self.how.retry_s) as file:
                yield from self._rows(pq.ParquetFile(file))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.url} cannot be read ({said(error)}): check the file, and start again") from None

    def _rows(self, parquet: ParquetFile) -> Iterator[dict[str, Any]]:
        sizes = [parquet.metadata.row_group(k).num_rows for k in range(parquet.num_row_groups)]
        starts = list(accumulate(sizes, initial=0))
        groups = [k for k in range(len(sizes)) if starts[k] < self.stop and starts[k + 1] > self.start]
        row = starts[groups[0]]
        wanted = [name for name in self.how.columns if name is not None]
        for batch in parquet.iter_batches(batch_size=64, row_groups=groups, columns=wanted):
            first, row = row, row + len(batch)
            low, high = max(first, self.start), min(row, self.stop)
            yield from batch.slice(low - first, max(0, high - low)).to_pylist()

    def _sample(self, cells: dict[str, Any]) -> Sample:
        image_column, caption_column, label_column = self.how.columns
        image, captions = cells[image_column], cells[caption_column]
        image = image.get("bytes") if isinstance(image, dict) else image
        if not image:
            raise BadSample("image is missing")
        texts = [text for text in (captions if isinstance(captions, list) else [captions]) if text]
        if not texts:
            raise BadSample("caption is missing")
        label = None if label_column is None else cells[label_column]
        if label_column is not None:
            label = parse_label("" if label is None else str(label))
        return Sample(image, [caption_text(text) for text in texts], label)


def _records(place: str, how: ReadOptions) -> RawSource | None:
    """A Parquet file that has images inside; None of other tables, which have to be local."""
    require(
        not is_local(place) or Path(local_path(place)).is_file(),
        f"source={place} is neither a file nor a folder: check the path",
    )
    with refusals_as(lambda said: DataError(f"source={place} cannot be read as Parquet ({said}): check the file")):
        found = persist(place, how.retry_s, partial(_footer, place))
    if found is not None:
        check_columns(place, found.schema.names, columns=how.columns, group="")
        if found.has_images(how.columns[0]):
            return RawSource([ParquetRows(0, found.rows, place, found.size, how)], [], found.fingerprint)
    require(is_local(place), f"source={place} is a table of paths: copy it to where its images are")
    return None


@dataclass(frozen=True, slots=True)
class _Footer:
    """Of a Parquet file: its schema, and a digest of all it says of each column of each row group."""

    size: int
    rows: int
    schema: Schema
    fingerprint: str

    def has_images(self, column: str) -> bool:
        import pyarrow as pa

        kind = self.schema.field(column).type
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_struct(kind))


def _footer(place: str) -> _Footer | None:
    """None of a file that is no Parquet."""
    import pyarrow.parquet as pq

    fs, path = file_system(place)
    with fs.open(path, block_size=_FOOTER, cache_type="bytes") as file:
        if file.read(len(_PARQUET)) != _PARQUET:
            return None
        parquet = pq.ParquetFile(file)
        size = file.seek(-8, os.SEEK_END) + 8  # 4 bytes of the footer's length, and PAR1
        length = int.from_bytes(file.read(4), "little")
        file.seek(size - 8 - length)
        digest = hashlib.sha256(file.read(length)).hexdigest()
        return _Footer(size, parquet.metadata.num_rows, parquet.schema_arrow, f"{size} {digest}")
