"""A table (CSV, TSV, Parquet) of image paths and captions. Rows that name the same image are its several captions."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipx.config.registry import option
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
from clipx.data.spec import Dataset, DataSpec, all_held_out
from clipx.errors import ConfigError, DataError, require

Columns = tuple[str, str, str | None]
"""The names of the image, caption and label column."""

_SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
_UNDECODABLE = "\N{REPLACEMENT CHARACTER}"


@option("data")
@dataclass(kw_only=True, slots=True)
class CsvSpec(DataSpec):
    kind: str = "csv"
    path: str | None = None  # the table, .parquet or text; image paths in it are relative to its folder
    held_out_path: str | None = None  # a table to evaluate on
    held_out_share: float = 0.05  # share of the images held out where held_out_path is not given; 0 for none
    separator: str | None = None  # one character, or comma, semicolon, tab, pipe; null: tab in a .tsv, else comma
    image_column: str = "filepath"
    caption_column: str = "caption"
    label_column: str | None = None  # the class of an image, for zero-shot: an index or a class name

    def __post_init__(self) -> None:
        DataSpec.__post_init__(self)
        check_held_out_share(self.held_out_share)
        require(
            self.separator is None or is_separator(self.separator),
            f"data.separator={self.separator!r} must be one character, or one of {', '.join(_SEPARATORS)}",
        )

    def open(self) -> Dataset:
        if self.path is None:
            raise ConfigError("data.path has no value: give the table of images and captions, e.g. data.path=train.csv")
        train = self._open(self.path, "data.path")
        if self.held_out_path is None:
            return Dataset(*split(train, self.held_out_share))
        return Dataset(train, self._open(self.held_out_path, "data.held_out_path"))

    def open_for_evaluation(self) -> Dataset:
        path = self.held_out_path or self.path
        return all_held_out(replace(self, path=path, held_out_path=None, held_out_share=0.0).open())

    def _open(self, path: str, key: str) -> CaptionTable:
        return CaptionTable.open(path, key, self.separator, (self.image_column, self.caption_column, self.label_column))


def is_separator(text: str) -> bool:
    character = _character(text, "")
    return len(character) == 1 and character not in '"\r\n'


def _character(separator: str | None, path: str) -> str:
    if separator is None:
        return "\t" if path.lower().endswith(".tsv") else ","
    return _SEPARATORS.get(separator, separator.replace("\\t", "\t"))


@dataclass(frozen=True, slots=True)
class CaptionTable(ImageFiles):
    """A source over a table's rows, one sample for each image."""

    captions: Packed[list[str]]
    labels: Packed[int | str | None]

    @classmethod
    def open(cls, path: str, key: str, separator: str | None, columns: Columns) -> CaptionTable:
        """`key` is the option that `path` is the value of. Raises ConfigError and DataError."""
        place = Path(path).expanduser()
        try:
            encoded = place.read_bytes()
        except OSError as error:
            raise ConfigError(f"{key}={path} cannot be read ({error.strerror}): give the path of a table") from None
        return cls.parse(place, encoded, _character(separator, path), columns, key.rpartition(".")[0])

    @classmethod
    def parse(cls, path: Path, encoded: bytes, separator: str, columns: Columns, group: str = "data") -> CaptionTable:
        """`group` is that of the options.

        Raises ConfigError for a column that is not there and DataError for a table without a sample.
        """
        captions: dict[str, list[str]] = {}
        labels: dict[str, int | str | None] = {}
        bad: list[BadRecord] = []
        if encoded.startswith(b"PAR1"):
            rows = _parquet_rows(path, encoded, columns, group)
        else:
            rows = _rows(path, encoded, separator, columns, group)
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
            raise DataError(f"{path} holds no row with an image and a caption ({len(bad)} rows without{reasons})")
        fingerprint = hashlib.sha256(f"{separator} {columns} ".encode() + encoded).hexdigest()[:16]
        return cls(
            folder=str(path.parent),
            images=Packed.of(captions),
            captions=Packed.of(captions.values()),
            labels=Packed.of(labels.values()),
            bad=bad,
            fingerprint=fingerprint,
        )

    def read(self, index: int) -> Sample:
        return Sample(read_bounded(self.key(index)), self.captions[index], self.labels[index])


def _cells(row: dict[str | None, Any], columns: Columns) -> tuple[str, str, int | str | None]:
    """(image, caption, label) of a row. Raises BadSample."""
    if any(extra.strip() for extra in row.get(None, ())):
        raise BadSample("row has more cells than the header has columns: a caption that holds a separator needs quotes")
    image, caption, label = ("" if name is None else (row[name] or "").strip() for name in columns)
    for text, what in ((image, "image"), (caption, "caption"), (label, "label")):
        if not text and not (what == "label" and columns[2] is None):
            raise BadSample(f"{what} is missing")
        if _UNDECODABLE in text:
            raise BadSample(f"{what} is not UTF-8")
    return image, caption, None if columns[2] is None else parse_label(label)


def _rows(
    path: Path, encoded: bytes, separator: str, columns: Columns, group: str
) -> Iterator[tuple[int, dict[str | None, Any]]]:
    """(line number, cells by column) of each row, after a check of the header. Cells too many are under None."""
    utf16 = encoded.startswith((b"\xff\xfe", b"\xfe\xff"))  # "Unicode text" of spreadsheet programs
    text = encoded.decode("utf-16" if utf16 else "utf-8-sig", errors="replace")
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        found = [name.strip() for name in reader.fieldnames or ()]
        if not found:
            raise DataError(f"{path} is empty: it needs a header line with {separator.join(columns[:2])}")
        check_columns(path, found, columns, group, _other_separator(text, separator))
        reader.fieldnames = found
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(
            f"{path}:{reader.line_num} cannot be read ({error}): look for a quote without its partner before that line"
        ) from None


def _parquet_rows(
    path: Path, encoded: bytes, columns: Columns, group: str
) -> Iterator[tuple[int, dict[str | None, Any]]]:
    """(row number from 1, cells by column). Several captions in a cell are several rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(encoded))
        check_columns(path, file.schema_arrow.names, columns, group)
        kind = file.schema_arrow.field(columns[0]).type
        require(
            pa.types.is_string(kind) or pa.types.is_large_string(kind),
            f"{columns[0]} of {path} holds {kind}, not paths: where these are images, make shards of them with "
            f"python -m clipx.data.prepare source={path} image_column={columns[0]}",
        )
        wanted = [name for name in columns if name is not None]
        number = 0
        for batch in file.iter_batches(columns=wanted):
            for cells in batch.to_pylist():
                number += 1
                captions = cells[columns[1]]
                for caption in (captions or [None]) if isinstance(captions, list) else [captions]:
                    row = {**cells, columns[1]: caption}
                    yield number, {name: None if cell is None else str(cell) for name, cell in row.items()}
    except pa.ArrowException as error:
        raise DataError(f"{path} cannot be read as Parquet ({' '.join(str(error).split())[:200]})") from None


def check_columns(
    path: Path | str, found: Sequence[str], columns: Columns, group: str, hint: str | None = None
) -> None:
    """Raises ConfigError for a missing column. `hint`: the separator that the table seems to have, by name."""
    for option_name, name in zip(("image_column", "caption_column", "label_column"), columns, strict=True):
        key = f"{group}.{option_name}".lstrip(".")
        separator = f"{group}.separator={hint}".lstrip(".")
        fix = f"the separator seems to be another: give {separator}" if hint else f"name one of them with {key}=…"
        require(
            name is None or name in found, f"{key}={name} is not a column of {path}: it has {', '.join(found)}; {fix}"
        )


def _other_separator(text: str, separator: str) -> str | None:
    """The name of the one that the header seems to have."""
    header = text.partition("\n")[0]
    names = [name for name, character in _SEPARATORS.items() if character in header]
    return names[0] if names and separator not in header else None
