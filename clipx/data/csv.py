"""Table (CSV, TSV, Parquet) of image paths and captions. Rows with the same image give it several captions."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from clipx.config.registry import frozen, option
from clipx.data.image_format import ENDING_UNREAD, ending_unread
from clipx.data.parquet_file import ENCRYPTED, MAGIC, PATH, batches, check_rows, open_parquet, rows, texts_of
from clipx.data.selection.spec import SelectionSpec
from clipx.data.shards.packed import Packed
from clipx.data.source import (
    BadRecord,
    BadSample,
    ImageFiles,
    Sample,
    check_held_out_share,
    parse_label,
    read_bounded,
    split,
)
from clipx.data.spec import Dataset
from clipx.data.text_table import TextTable
from clipx.errors import ConfigError, DataError, require
from clipx.storage.local import check_file
from clipx.storage.text_file import decode

Columns = tuple[str, str, str | None]
"""Names of the image, caption and label column."""

_SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
_UNDECODABLE = re.compile("[\ud800-\udfff]")
_BATCH = 1 << 16  # rows of a Parquet table that are read together


@option("data")
@frozen
class CsvSpec(SelectionSpec):
    """A table (CSV, TSV, Parquet) of image paths and captions. Rows with the same image give it several captions."""

    kind: str = "csv"
    """Kind of data: a table of image paths and captions."""

    path: str | None = None
    """Table to train on, Parquet or text with a header line. Required. Image paths are relative to its folder."""

    held_out_path: str | None = None
    """Table to evaluate on, in the format of path. null: held_out_share of the images of path is held out."""

    held_out_share: float = 0.05
    """Share of the images held out for evaluation, evenly spread, in [0, 0.5]. 0: none. Has no effect with
    held_out_path."""

    separator: str | None = None
    """Separator of a text table: one character, or comma, semicolon, tab, pipe. null: tab in .tsv files, else comma."""

    image_column: str = "filepath"
    """Name of the column with the image paths."""

    caption_column: str = "caption"
    """Name of the column with the captions. In Parquet a cell may hold a list of captions."""

    label_column: str | None = None
    """Name of the column with the class of each image, for zero-shot evaluation: an index or a class name. null: no
    labels."""

    def __post_init__(self) -> None:
        SelectionSpec.__post_init__(self)
        check_held_out_share(self.held_out_share)
        require(
            self.separator is None or is_separator(self.separator),
            f"data.separator={self.separator!r} must be one character, or one of {', '.join(_SEPARATORS)}",
        )

    def count(self) -> int | None:
        return None if self.path is None else sum(self.open().train.sizes)

    def check_complete(self) -> None:
        fix = "give the table of images and captions, e.g. data.path=train.csv"
        require(self.path is not None, f"data.path has no value: {fix}")

    def check_files(self) -> None:
        SelectionSpec.check_files(self)
        for key, path in (("data.path", self.path), ("data.held_out_path", self.held_out_path)):
            if path is not None:
                with _readable(path, key):
                    check_file(Path(path).expanduser())

    def open(self) -> Dataset:
        self.check_complete()
        assert self.path is not None
        train = self._open(self.path, "data.path")
        if self.held_out_path is None:
            return self.select_files(Dataset(*split(train, self.held_out_share), notes=train.notes))
        held_out = self._open(self.held_out_path, "data.held_out_path")
        return self.select_files(Dataset(train, held_out, notes=[*train.notes, *held_out.notes]))

    def evaluated(self) -> Self:
        path = self.held_out_path or self.path
        return replace(self.unselected(), path=path, held_out_path=None, held_out_share=0.0)

    def _open(self, path: str, key: str) -> CaptionTable:
        return CaptionTable.open(path, key, self.separator, (self.image_column, self.caption_column, self.label_column))


@contextlib.contextmanager
def _readable(path: str, key: str) -> Iterator[None]:
    """Context of a read of a table, the value of the option `key`, whose errors are of the user."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read ({error.strerror}): give the path of a table") from None


def is_separator(text: str) -> bool:
    character = _character(text, "")
    return len(character) == 1 and character not in '"\r\n'


def _character(separator: str | None, path: str) -> str:
    if separator is None:
        return "\t" if path.lower().endswith(".tsv") else ","
    return _SEPARATORS.get(separator, separator.replace("\\t", "\t"))


@dataclass(frozen=True, slots=True)
class CaptionTable(ImageFiles):
    """Source over the rows of a table, with one sample per image."""

    captions: Packed[list[str]]
    labels: Packed[int | str | None]
    notes: Sequence[str]

    @classmethod
    def open(cls, path: str, key: str, separator: str | None, columns: Columns) -> CaptionTable:
        """Opens the table at `path`, the value of the option `key`. Raises ConfigError or DataError."""
        place = Path(path).expanduser()
        with _readable(path, key):
            encoded = place.read_bytes()
        return cls.parse(place, encoded, _character(separator, path), columns, key.rpartition(".")[0])

    @classmethod
    def parse(cls, path: Path, encoded: bytes, separator: str, columns: Columns, group: str = "data") -> CaptionTable:
        """Parses the content of a table. `group` is the group of the options, for error messages.

        Raises ConfigError for a missing column and DataError for a table without a sample.
        """
        captions: dict[str, list[str]] = {}
        labels: dict[str, int | str | None] = {}
        bad: list[BadRecord] = []
        table = None
        rows: Iterator[tuple[int, Mapping[str | None, Any]]]
        if encoded.startswith((MAGIC, ENCRYPTED)):
            rows = _parquet_rows(path, encoded, columns, group)
        else:
            try:
                table = TextTable(str(path), decode(encoded, "surrogateescape"), separator)
            except ValueError as error:
                raise DataError(f"{path}: {error}") from None
            rows = _rows(table, columns, group)
        for line, row in rows:
            try:
                image, caption, label = _cells(row, columns)
                if labels.setdefault(image, label) != label:
                    raise BadSample(f"label differs from an earlier one of this image: {label}, not {labels[image]}")
            except BadSample as fault:
                bad.append(BadRecord(f"{path}:{line}", str(fault)))
                continue
            captions.setdefault(image, []).append(caption)
        if not captions:
            reasons = f", e.g. line {bad[0].key.rpartition(':')[2]}: {bad[0].reason}" if bad else ""
            raise DataError(f"{path} has no row with an image and a caption ({len(bad)} rows without{reasons})")
        skipped = sum(ENDING_UNREAD in record.reason for record in bad)
        facts = f"{separator} {columns} " + (f"without {skipped} rows " if skipped else "")
        fingerprint = hashlib.sha256(facts.encode() + encoded).hexdigest()[:16]
        return cls(
            folder=str(path.parent),
            images=Packed.of(captions),
            captions=Packed.of(captions.values()),
            labels=Packed.of(labels.values()),
            bad=bad,
            fingerprint=fingerprint,
            notes=[] if table is None else table.notes(),
        )

    def read(self, index: int) -> Sample:
        return Sample(read_bounded(self.key(index)), self.captions[index], self.labels[index])


def _cells(row: Mapping[str | None, str | None], columns: Columns) -> tuple[str, str, int | str | None]:
    """Returns (image, caption, label) of a row. Raises BadSample."""
    if None in row:
        raise BadSample("row has more cells than the header has columns: quote a caption that contains a separator")
    image, caption, label = ("" if name is None else (row.get(name) or "").strip() for name in columns)
    for text, what in ((image, "image"), (caption, "caption"), (label, "label")):
        if not text and not (what == "label" and columns[2] is None):
            raise BadSample(f"{what} is missing")
        if _UNDECODABLE.search(text):
            raise BadSample(f"{what} is not UTF-8")
    if reason := ending_unread(image):
        raise BadSample(reason)
    return image, caption, None if columns[2] is None else parse_label(label)


def _rows(table: TextTable, columns: Columns, group: str) -> Iterator[tuple[int, Mapping[str | None, str | None]]]:
    """Yields (line number, cells by column) of each row after checking the header. Surplus cells have the key None."""
    rows = table.rows()
    names = [name.strip() for name in next(rows, (0, []))[1]]
    if not names:
        raise DataError(f"{table.path} is empty: it needs a header line with {table.separator.join(columns[:2])}")
    check_columns(table.path, names, columns, group, _other_separator(table))
    table.names, table.image = names, names.index(columns[0])
    for line, cells in rows:
        row: dict[str | None, str | None] = dict(zip(names, cells, strict=False))
        if any(extra.strip() for extra in cells[len(names) :]):
            row[None] = None
        yield line, row


def _parquet_rows(
    path: Path, encoded: bytes, columns: Columns, group: str
) -> Iterator[tuple[int, dict[str | None, Any]]]:
    """Yields (row number from 1, cells by column). A cell with several captions gives several rows."""
    import pyarrow as pa

    file = open_parquet(pa.BufferReader(encoded), str(path))
    check_columns(path, file.schema_arrow.names, columns, group)
    fix = f"if these are images, write them into shards with python -m clipx.data.prepare source={path}"
    named = (columns[0], [columns[1]], columns[2])
    check_rows(file.schema_arrow, named, PATH, str(path), group, f"{fix} image_column={columns[0]}")
    number = 0
    for batch in batches(file, [name for name in columns if name is not None], str(path), _BATCH):
        for image, found, label in rows(batch, named):
            number += 1
            for caption in texts_of(found[columns[1]]) or [""]:
                cells = dict(zip(columns, (image, caption, label), strict=True))
                yield number, {name: None if x is None else str(x) for name, x in cells.items() if name}


def check_columns(
    path: Path | str, found: Sequence[str], columns: Columns, group: str, hint: str | None = None
) -> None:
    """Raises ConfigError for a missing column. `hint` is the name of the separator that the table seems to have."""
    for option_name, name in zip(("image_column", "caption_column", "label_column"), columns, strict=True):
        key = f"{group}.{option_name}".lstrip(".")
        separator = f"{group}.separator={hint}".lstrip(".")
        fix = f"the separator seems to differ: give {separator}" if hint else f"name one of them with {key}=…"
        require(
            name is None or name in found, f"{key}={name} is not a column of {path}: it has {', '.join(found)}; {fix}"
        )
        count = found.count(name or "")
        require(count < 2, f"{key}={name} of {path} names {count} columns: rename one, so that each has its own name")


def _other_separator(table: TextTable) -> str | None:
    """Returns the name of the separator that the header seems to have, if it is not that of the table."""
    header = table.text.partition("\n")[0]
    names = [name for name, character in _SEPARATORS.items() if character in header]
    return names[0] if names and table.separator not in header else None
