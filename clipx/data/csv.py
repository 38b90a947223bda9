"""Table (CSV, TSV, Parquet) of image paths and captions. Rows with the same image give it several captions."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.data.image_files import ENDING_UNREAD, IMAGES, ImageFiles, Packed, ending_unread
from clipx.data.parquet_file import ENCRYPTED, MAGIC, PATH, batches, check_rows, open_parquet, rows, texts_of
from clipx.data.selection.spec import LocalFilesSpec, SelectionSpec
from clipx.data.source import BadRecord, BadSample, Sample, parse_label, read_bounded, split
from clipx.data.spec import Dataset
from clipx.errors import ConfigError, DataError, require
from clipx.storage.files import decode
from clipx.storage.local import check_file

Columns = tuple[str, str, str | None]  # names of the image, caption and label column

NumberedRows = Iterator[tuple[int, Sequence[str | None] | None]]
"""(line or row from 1, cells of image, caption and label) of each row; None for one with surplus cells."""

_SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
_UNDECODABLE = re.compile("[\ud800-\udfff]")
_BATCH = 1 << 16  # rows of a Parquet table that are read together
_MAX_CELL = 1 << 17  # characters of a quoted cell


def check_separator(key: str, text: str) -> None:
    """Raises ConfigError unless a value of the option `key` is a separator of the cells of a table."""
    character = _character(text, "")
    choices = f"must be one character, or one of {', '.join(_SEPARATORS)}"
    require(len(character) == 1 and character not in '"\r\n', f"{key}={text!r} {choices}")


@register("data")
@frozen
class CsvSpec(LocalFilesSpec):
    """A table (CSV, TSV, Parquet) of image paths and captions. Rows with the same image give it several captions.

    A text table has a header line. Image paths are relative to its folder.
    """

    kind: str = "csv"
    """Kind of data: a table of image paths and captions."""

    path_is = "the table of images and captions, e.g. data.path=train.csv"

    separator: str | None = option(None, check=check_separator)
    """Separator of a text table: one character, or comma, semicolon, tab, pipe. null: tab in .tsv files, else comma."""

    image_column: str = "filepath"
    """Name of the column with the image paths."""

    caption_column: str = "caption"
    """Name of the column with the captions. In Parquet a cell may hold a list of captions."""

    label_column: str | None = None
    """Name of the column with the class of each image, for zero-shot evaluation: an index or a class name. null: no
    labels."""

    def check_files(self) -> None:
        SelectionSpec.check_files(self)
        for key, path in (("data.path", self.path), ("data.held_out_path", self.held_out_path)):
            if path is not None:
                with _readable(path, key):
                    check_file(Path(path))

    def open(self) -> Dataset:
        self.check_complete()
        assert self.path is not None
        train = self._open(self.path, "data.path")
        if self.held_out_path is None:
            return self.select_files(Dataset(*split(train, self.held_out_share), notes=train.notes))
        held_out = self._open(self.held_out_path, "data.held_out_path")
        return self.select_files(Dataset(train, held_out, notes=[*train.notes, *held_out.notes]))

    def _open(self, path: str, key: str) -> CaptionTable:
        return CaptionTable.open(path, key, self.separator, (self.image_column, self.caption_column, self.label_column))


@contextlib.contextmanager
def _readable(path: str, key: str) -> Iterator[None]:
    """Context of a read of a table, the value of the option `key`, whose errors are of the user."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read ({error.strerror}): give the path of a table") from None


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
        """Opens the table at `path`, the value of the option `key`. Raises ConfigError for a missing column, and
        DataError for a table without a sample."""
        with _readable(path, key):
            encoded = Path(path).read_bytes()
        character, group = _character(separator, path), key.rpartition(".")[0]
        captions: dict[str, list[str]] = {}
        labels: dict[str, int | str | None] = {}
        bad: list[BadRecord] = []
        table = None
        if encoded.startswith((MAGIC, ENCRYPTED)):
            rows = _parquet_rows(path, encoded, columns, group)
        else:
            try:
                table = TextTable(path, decode(encoded, "surrogateescape"), character)
            except ValueError as error:
                raise DataError(f"{path}: {error}") from None
            rows = _text_rows(table, columns, group)
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
        facts = f"{character} {columns} " + (f"without {skipped} rows " if skipped else "")
        return cls(
            folder=str(Path(path).parent),
            images=Packed.of(captions),
            captions=Packed.of(captions.values()),
            labels=Packed.of(labels.values()),
            bad=bad,
            fingerprint=hashlib.sha256(facts.encode() + encoded).hexdigest()[:16],
            notes=[] if table is None else table.notes(),
        )

    def read(self, index: int) -> Sample:
        return Sample(read_bounded(self.key(index)), self.captions[index], self.labels[index])


def _cells(row: Sequence[str | None] | None, columns: Columns) -> tuple[str, str, int | str | None]:
    """Returns (image, caption, label) of the cells of a row. Raises BadSample."""
    if row is None:
        raise BadSample("row has more cells than the header has columns: quote a caption that contains a separator")
    image, caption, label = ((cell or "").strip() for cell in row)
    for text, what in ((image, "image"), (caption, "caption"), (label, "label")):
        if not text and not (what == "label" and columns[2] is None):
            raise BadSample(f"{what} is missing")
        if _UNDECODABLE.search(text):
            raise BadSample(f"{what} is not UTF-8")
    if reason := ending_unread(image):
        raise BadSample(reason)
    return image, caption, None if columns[2] is None else parse_label(label)


def _text_rows(table: TextTable, columns: Columns, group: str) -> NumberedRows:
    """Yields the rows of a text by line. Checks the header first."""
    rows = table.rows()
    names = [name.strip() for name in next(rows, (0, []))[1]]
    if not names:
        raise DataError(f"{table.path} is empty: it needs a header line with {table.separator.join(columns[:2])}")
    check_columns(table.path, names, columns, group, _other_separator(table))
    table.names, table.image = names, names.index(columns[0])
    places = [len(names) if name is None else names.index(name) for name in columns]
    for line, cells in rows:
        surplus = any(extra.strip() for extra in cells[len(names) :])
        yield line, None if surplus else [cells[at] if at < min(len(cells), len(names)) else "" for at in places]


def _parquet_rows(path: str, encoded: bytes, columns: Columns, group: str) -> NumberedRows:
    """Yields the rows of a Parquet file by number. A cell with several captions gives several rows."""
    import pyarrow as pa

    file = open_parquet(pa.BufferReader(encoded), path)
    check_columns(path, file.schema_arrow.names, columns, group)
    fix = f"if these are images, write them into shards with python -m clipx.prepare source={path}"
    named = (columns[0], [columns[1]], columns[2])
    check_rows(file.schema_arrow, named, PATH, path, group, f"{fix} image_column={columns[0]}")
    number = 0
    for batch in batches(file, [name for name in columns if name is not None], path, _BATCH):
        for image, found, label in rows(batch, named):
            number += 1
            for caption in texts_of(found[columns[1]]) or [""]:
                yield number, [image, caption, None if label is None else str(label)]


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


# ------------------------------------------------------------------------------------------------- tables of text


@dataclass(slots=True)
class TextTable:
    r"""Rows of a text with \n as ends of lines, with cells quoted as by spreadsheets, or not at all. `path`: its file.

    A quoted cell begins with a quote, and ends with a quote before a separator or the end of a line; two quotes in it
    are one. Every other quote is text, as in `20" monitor` and `"Hello" says the sign`. A quoted cell may have several
    lines, unless one of them is a row: then its first quote is text, too.
    """

    path: str
    text: str
    separator: str
    names: Sequence[str] = ()  # cells of the first row
    image: int = 0  # place of the cells with paths of images, by which rows are known
    unquoted: list[int] = field(default_factory=list)  # lines of the cells so far that begin with a quote and are text
    spanning: list[int] = field(default_factory=list)  # first lines of the cells so far that have several lines
    _quoted: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self.text = self.text.removesuffix("\n") + "\n"
        self._quoted = re.compile(f'"((?:[^"]++|"")*+)"(?=\n|{re.escape(self.separator)})')

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yields (line from 1, cells) of each row that is not blank. Raises DataError for an ambiguous quote."""
        line, start = 1, 0
        while start < len(self.text):
            end = self.text.index("\n", start)
            row = self.text[start:end]
            if '"' in row:
                cells, end = self._cells(start, line)
                yield line, cells
                line += self.text.count("\n", start, end)
            elif row:
                yield line, row.split(self.separator)
            line, start = line + 1, end + 1

    def notes(self) -> list[str]:
        """Returns remarks on the quotes of the rows so far."""
        found = [(self.unquoted, "begin with a quote that is read as text"), (self.spanning, "have several lines")]
        return [
            f"{self.path}: {len(lines):,} cells {what}, e.g. in line {lines[0]:,}" for lines, what in found if lines
        ]

    def _cells(self, start: int, line: int) -> tuple[list[str], int]:
        """Returns the cells of the row at `start`, and the place of its end."""
        cells, at, literal = list[str](), start, re.compile(f"[^\n{re.escape(self.separator)}]*")
        while True:
            found = self._quoted.match(self.text, at, at + _MAX_CELL)
            if found and "\n" in found[1] and self._holds_row(found.end(), start, line):
                found = None
            if found is None:
                found = literal.match(self.text, at)
                assert found is not None
                cells.append(found[0])
                if found[0].startswith('"'):
                    self.unquoted.append(line)
            else:
                cells.append(found[1].replace('""', '"'))
                if "\n" in found[1]:
                    self.spanning.append(line)
            at = found.end() + 1
            if self.text[found.end()] == "\n":
                return cells, found.end()

    def _holds_row(self, end: int, start: int, line: int) -> bool:
        """Returns whether lines of a quoted cell are rows of the table. Raises DataError if they may be."""
        first, *others = self.text[start : self.text.index("\n", end)].split("\n")
        rows = [row for row in (line.split(self.separator) for line in others) if len(row) == len(self.names)]
        if any(map(self._has_image, rows)):
            return True
        row = first.split(self.separator)
        if len(rows) < len(others) or len(row) != len(self.names) or self._has_image(row):
            return False
        raise DataError(
            f"{self.path}:{line}: a quote begins a cell of {len(others) + 1} lines, each of which may be a row as "
            'well: write "" for a quote in a cell, and quote each cell that has one'
        )

    def _has_image(self, row: Sequence[str]) -> bool:
        return row[self.image].strip(' "').lower().endswith(IMAGES)
