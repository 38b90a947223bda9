"""A table of image paths and captions. Rows that name the same image are its several captions."""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipx.config import option
from clipx.data import Dataset, DataSpec
from clipx.data.source import MAX_BYTES, Bad, BadSample, Sample, Source, check_share, parse_label, split
from clipx.errors import ConfigError, DataError, require

Columns = tuple[str, str, str | None]
"""The names of the image, caption and label column."""

_BLOCK = 100  # rows that count as a shard: their order is mixed over the whole table, which files allow at no cost
_SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
_UNDECODABLE = "\N{REPLACEMENT CHARACTER}"


@option("data")
@dataclass(kw_only=True, slots=True)
class CsvSpec(DataSpec):
    kind: str = "csv"
    path: str | None = None  # the table; image paths in it are relative to its folder
    held_out_path: str | None = None  # a table to evaluate on
    held_out_share: float = 0.05  # share of the images held out where held_out_path is not given; 0 for none
    separator: str = ","  # one character, or comma, semicolon, tab, pipe: the names need no quotes on a command line
    image_column: str = "filepath"
    caption_column: str = "caption"
    label_column: str | None = None  # the class of an image, for zero-shot: an index or a class name

    def __post_init__(self) -> None:
        DataSpec.__post_init__(self)
        check_share(self.held_out_share)
        require(
            len(self._separator) == 1 and self._separator not in '"\r\n',
            f"data.separator={self.separator!r} must be one character, or one of {', '.join(_SEPARATORS)}",
        )

    @property
    def _separator(self) -> str:
        return _SEPARATORS.get(self.separator, self.separator.replace("\\t", "\t"))

    def open(self) -> Dataset:
        if self.path is None:
            raise ConfigError("data.path has no value: give the table of images and captions, e.g. data.path=train.csv")
        train: Source = self._open(self.path, "data.path")
        held_out: Source | None
        if self.held_out_path is not None:
            held_out = self._open(self.held_out_path, "data.held_out_path")
        else:
            train, held_out = split(train, self.held_out_share)
        return Dataset(train, held_out, None)

    def _open(self, path: str, key: str) -> Table:
        place = Path(path).expanduser()
        try:
            encoded = place.read_bytes()
        except OSError as error:
            raise ConfigError(f"{key}={path} cannot be read ({error.strerror}): give the path of a table") from None
        columns = (self.image_column, self.caption_column, self.label_column)
        return Table.parse(place, encoded, self._separator, columns)


@dataclass(frozen=True, slots=True)
class Table:
    """A source over a table's rows, one sample for each image."""

    folder: str
    images: Sequence[str]
    captions: Sequence[Sequence[str]]
    labels: Sequence[int | str | None]
    bad: Sequence[Bad]
    fingerprint: str

    @classmethod
    def parse(cls, path: Path, encoded: bytes, separator: str, columns: Columns) -> Table:
        """Raises ConfigError for a column that is not there and DataError for a table without a sample."""
        captions: dict[str, list[str]] = {}
        labels: dict[str, int | str | None] = {}
        bad: list[Bad] = []
        for line, row in _rows(path, encoded, separator, columns):
            try:
                image, caption, label = _cells(row, columns)
                if labels.setdefault(image, label) != label:
                    raise BadSample(f"label differs from an earlier one of this image: {label}, not {labels[image]}")
            except BadSample as fault:
                bad.append(Bad(f"{path}:{line}", str(fault)))
                continue
            captions.setdefault(image, []).append(caption)
        if not captions:
            reasons = f", e.g. line {bad[0].key.rpartition(':')[2]}: {bad[0].reason}" if bad else ""
            raise DataError(f"{path} holds no row with an image and a caption ({len(bad)} rows without{reasons})")
        fingerprint = hashlib.sha256(f"{separator} {columns} ".encode() + encoded).hexdigest()[:16]
        return cls(str(path.parent), list(captions), list(captions.values()), list(labels.values()), bad, fingerprint)

    @property
    def sizes(self) -> Sequence[int]:
        whole, rest = divmod(len(self.images), _BLOCK)
        return [_BLOCK] * whole + [rest] * (rest > 0)

    def key(self, index: int) -> str:
        return os.path.join(self.folder, self.images[index])  # noqa: PTH118

    def read(self, index: int) -> Sample:
        try:
            with open(self.key(index), "rb", buffering=0) as file:  # noqa: PTH123
                size = os.fstat(file.fileno()).st_size
                if size > MAX_BYTES:
                    raise BadSample(f"image is larger than {MAX_BYTES >> 20} MiB")
                image = file.read(size) or b""
        except (OSError, ValueError) as error:  # ValueError: the path holds a zero byte
            raise BadSample(f"image cannot be read: {getattr(error, 'strerror', error)}") from None
        return Sample(image, self.captions[index], self.labels[index])


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


def _rows(path: Path, encoded: bytes, separator: str, columns: Columns) -> Iterator[tuple[int, dict[str | None, Any]]]:
    """(line number, cells by column) of each row, after a check of the header. Cells too many are under None."""
    utf16 = encoded.startswith((b"\xff\xfe", b"\xfe\xff"))  # "Unicode text" of spreadsheet programs
    text = encoded.decode("utf-16" if utf16 else "utf-8-sig", errors="replace")
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        found = [name.strip() for name in reader.fieldnames or ()]
        _check_header(path, found, text, separator, columns)
        reader.fieldnames = found
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(
            f"{path}:{reader.line_num} cannot be read ({error}): look for a quote without its partner before that line"
        ) from None


def _check_header(path: Path, found: list[str], text: str, separator: str, columns: Columns) -> None:
    if not found:
        raise DataError(f"{path} is empty: it needs a header line with {columns[0]}{separator}{columns[1]}")
    for option_name, name in zip(("image_column", "caption_column", "label_column"), columns, strict=True):
        if name is not None and name not in found:
            hint = _other_separator(text, separator) or f"name one of them with data.{option_name}=…"
            raise ConfigError(f"data.{option_name}={name} is not a column of {path}: it has {', '.join(found)}; {hint}")


def _other_separator(text: str, separator: str) -> str | None:
    header = text.partition("\n")[0]
    if separator in header:
        return None
    names = [name for name, character in _SEPARATORS.items() if character in header]
    return f"the separator seems to be another: give data.separator={names[0]}" if names else None
