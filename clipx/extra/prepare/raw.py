"""Sources of `prepare`: tables of image paths, Parquet files with embedded images, folders of images and captions.

A source is a list of sample ranges, one for each file, in order. A range is small and is sent to a worker process,
which opens the file. Therefore memory does not grow with the number of files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.data.csv import CaptionTable, Columns, check_columns
from clipx.data.folder import images_of, unread_notes
from clipx.data.image_files import IMAGES, is_hidden, walk
from clipx.data.parquet_file import (
    ENCRYPTED,
    FIX,
    IMAGE,
    MAGIC,
    ColumnNames,
    batches,
    check_rows,
    is_string,
    open_parquet,
    rows,
    texts_of,
)
from clipx.data.shards.index import RETRY_S, shard_info
from clipx.data.shards.urls import expand
from clipx.data.source import MAX_TEXT, BadRecord, BadSample, Sample, caption_text, parse_label, read_bounded
from clipx.errors import DataError, require
from clipx.escape import print_stderr
from clipx.storage.files import errors_as, filled_lines, is_local, local_path
from clipx.storage.remote import REQUESTS, open_sequential, read_range

if TYPE_CHECKING:
    from clipx.extra.prepare.command import PrepareSpec

ReadSample = Callable[[], Sample]
"""Raises BadSample."""

TABLES = (".csv", ".tsv", ".parquet")
_ROWS = 64  # rows with images that are read together


@dataclass(frozen=True, slots=True)
class SampleRange:
    """Consecutive samples of a file, from `start` to before `stop`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> SampleRange:
        """Returns the samples from `start` to before `stop`, relative to this range."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    def samples(self) -> Iterator[tuple[str, ReadSample]]:
        """Yields (origin, function that reads the sample) of each sample. The origin is a path, or path:row."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RawSource:
    """A source: its sample ranges, the unusable rows, and a fingerprint of its content."""

    ranges: Sequence[SampleRange]
    bad: Sequence[BadRecord]
    fingerprint: str

    def shards(self, size: int) -> list[list[SampleRange]]:
        """Splits the samples of all ranges into shards of `size` samples; the last one may have fewer."""
        shards: list[list[SampleRange]] = []
        room = 0
        for samples in self.ranges:
            start = 0
            while start < len(samples):
                if room == 0:
                    shards.append([])
                    room = size
                stop = min(len(samples), start + room)
                shards[-1].append(samples.part(start, stop))
                room -= stop - start
                start = stop
        return shards


def open_raw(spec: PrepareSpec) -> RawSource:
    """Opens a source: a path, pattern, @list or URL of tables or folders; several are joined by `::`.

    Inspects all files before it reads a sample. Raises ConfigError and DataError if one of them cannot be read.
    """
    files = [file for path in expand(spec.source, "source", "file") for file in _list_files(path)]
    with ThreadPoolExecutor(REQUESTS) as pool:  # a remote request takes about 50 ms
        found = pool.map(lambda file: file if isinstance(file, RawSource) else _open_parquet(file, spec), files)
        inspected = list(found)
    # Opens tables of paths one after the other, because each is read as a whole.
    opened = [one or _open_table(str(file), spec) for file, one in zip(files, inspected, strict=True)]
    digest = hashlib.sha256("\n".join(one.fingerprint for one in opened).encode()).hexdigest()[:16]
    bad = [record for one in opened for record in one.bad]
    return RawSource([samples for one in opened for samples in one.ranges], bad, digest)


def _list_files(path: str) -> Sequence[str | RawSource]:
    """Returns the images of a folder, or its tables if it has no images. Any other path is returned unchanged."""
    if not is_local(path) or not Path(local_path(path)).is_dir():
        return [path]
    files = sorted(walk(str(Path(local_path(path))), f"source={path}"))
    images, tables = images_of(files), [f for f in files if f.lower().endswith(TABLES) and not is_hidden(f)]
    require(
        bool(images or tables), f"source={path} holds no {', '.join(IMAGES + TABLES)} file: give a folder that does"
    )
    if not images:
        return tables
    chosen = _one_of_each_name(images)
    notes = unread_notes(path, files)
    if others := sorted({*images} - {*chosen}):
        rule = f"of images of one name, only the first in the order {', '.join(IMAGES)} is"
        notes.append(f"{path}: {len(others):,} images are not read, e.g. {others[0]}: {rule}")
    if tables:
        notes.append(f"{path} holds images: its {len(tables):,} tables are skipped; to read them, name their files")
    for note in notes:
        print_stderr(note)
    names = hashlib.sha256("\n".join(chosen).encode("utf-8", "surrogateescape")).hexdigest()
    return [RawSource([CaptionedImages(0, len(chosen), chosen)], [], names)]


def _one_of_each_name(images: Sequence[str]) -> list[str]:
    """Returns the images without those of which another one, that is read first, has the name: a mask of a photo."""
    chosen: dict[str, str] = {}
    for image in sorted(images, key=lambda image: IMAGES.index(f".{image.rpartition('.')[2].lower()}")):
        chosen.setdefault(image.rpartition(".")[0], image)
    return sorted(chosen.values())


# --------------------------------------------------------------------------------------------- tables of paths


@lru_cache(maxsize=1)
def _table(path: str, separator: str | None, columns: Columns, mtime: int) -> CaptionTable:
    """Opens a table. Caches the last one; a single table is opened in the parent, and forked processes share it.

    Raises DataError if the modification time of the file is not `mtime`.
    """
    table = CaptionTable.open(path, "source", separator, columns)
    if _mtime(path) != mtime:
        raise DataError(f"source={path} changed while it was read: run the command again when the file is complete")
    return table


def _mtime(path: str) -> int:
    return Path(path).stat().st_mtime_ns


def _open_table(url: str, spec: PrepareSpec) -> RawSource:
    path, mtime = local_path(url), _mtime(local_path(url))
    table = _table(path, spec.separator, spec.columns, mtime)
    for note in table.notes:
        print_stderr(note)
    return RawSource([TableRows(0, len(table.images), path, spec, mtime)], table.bad, table.fingerprint)


@dataclass(frozen=True, slots=True)
class TableRows(SampleRange):
    """Images of a table of paths. Rows that name the same image become captions of one sample."""

    path: str
    spec: PrepareSpec
    mtime: int

    def samples(self) -> Iterator[tuple[str, ReadSample]]:
        table = _table(self.path, self.spec.separator, self.spec.columns, self.mtime)
        return ((table.key(index), partial(table.read, index)) for index in range(self.start, self.stop))


# ---------------------------------------------------------------------------------------------------- folders


@dataclass(frozen=True, slots=True)
class CaptionedImages(SampleRange):
    """Images with their captions in text files of the same name, one caption per line. `images`: those of the range."""

    images: Sequence[str]

    def part(self, start: int, stop: int) -> SampleRange:
        return replace(self, start=start, stop=stop, images=self.images[start:stop])

    def samples(self) -> Iterator[tuple[str, ReadSample]]:
        return ((image, partial(_read_captioned, image)) for image in self.images)


def _read_captioned(image: str) -> Sample:
    name = image.rpartition(".")[0]
    captions = next((text for text in (f"{name}.txt", f"{name}.TXT") if os.access(text, os.F_OK)), None)
    if captions is None:
        other = "; its .json is not read" if os.access(f"{name}.json", os.F_OK) else ""
        raise BadSample(f"caption is missing: there is no .txt of its name{other}")
    try:
        found = filled_lines(read_bounded(captions, "caption", MAX_TEXT))
    except ValueError:
        raise BadSample("caption is not UTF-8") from None
    if not found:
        raise BadSample("caption is empty")
    return Sample(read_bounded(image), found)


# --------------------------------------------------------------------------------- Parquet with embedded images


@dataclass(frozen=True, slots=True)
class ParquetRows(SampleRange):
    """Rows of a Parquet file with embedded images. `size`: size of the file in bytes."""

    url: str
    size: int
    spec: PrepareSpec

    def samples(self) -> Iterator[tuple[str, ReadSample]]:
        caption = self.spec.columns[1]
        for number, (image, captions, label) in enumerate(self._read_rows(), start=self.start + 1):
            yield f"{self.url}:{number}", partial(self._sample, image, captions[caption], label)

    def _read_rows(self) -> Iterator[tuple[Any, Mapping[str, Any], int | str | None]]:
        """Yields (image, captions, label) of each row. Reads the row groups that contain them, 64 rows at a time."""
        with open_sequential(self.url, self.size, RETRY_S) as source:
            file = open_parquet(source, self.url)
            sizes = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
            starts = list(accumulate(sizes, initial=0))
            groups = [k for k in range(len(sizes)) if starts[k] < self.stop and starts[k + 1] > self.start]
            row = starts[groups[0]]
            columns = [name for name in self.spec.columns if name is not None]
            for batch in batches(file, columns, self.url, _ROWS, row_groups=groups):
                first, row = row, row + len(batch)
                low, high = max(first, self.start), min(row, self.stop)
                yield from rows(batch.slice(low - first, max(0, high - low)), _named(self.spec.columns))

    def _sample(self, image: bytes | None, captions: Any, label: int | str | None) -> Sample:
        if not image:
            raise BadSample("image is missing")
        texts = texts_of(captions)
        if not texts:
            raise BadSample("caption is missing")
        if self.spec.columns[2] is not None:
            label = parse_label("" if label is None else str(label))
        return Sample(image, [caption_text(text) for text in texts], label)


def _named(columns: Columns) -> ColumnNames:
    image, caption, label = columns
    return image, [caption], label


def _open_parquet(url: str, spec: PrepareSpec) -> RawSource | None:
    """Opens a Parquet file with embedded images. Returns None for other tables, which must be local."""
    require(
        not is_local(url) or Path(local_path(url)).is_file(),
        f"source={url} is neither a file nor a folder: check the path",
    )
    with errors_as(DataError, f"source={url} cannot be read as Parquet", "check the file"):
        head = read_range(url, 0, len(MAGIC), RETRY_S)
    if head in (MAGIC, ENCRYPTED):
        size, column = int(shard_info(url, RETRY_S)["size"]), spec.columns[0]
        with open_sequential(url, size, RETRY_S) as source, errors_as(DataError, f"{url} has a damaged footer", FIX):
            file = open_parquet(source, url)
            schema, number = file.schema_arrow, file.metadata.num_rows
        check_columns(url, schema.names, spec.columns, group="")
        kind = schema.field(column).type if schema.names.count(column) == 1 else None
        if kind is not None and not is_string(kind):
            check_rows(schema, _named(spec.columns), IMAGE, url, "", "name the column with paths or images")
            length = int.from_bytes(read_range(url, size - 8, size - 4, RETRY_S), "little")  # then PAR1
            footer = hashlib.sha256(read_range(url, size - 8 - length, size - 8, RETRY_S)).hexdigest()
            return RawSource([ParquetRows(0, number, url, size, spec)], [], f"{size} {footer}")
    require(is_local(url), f"source={url} is a table of paths: copy it to the machine that has its images")
    return None
