"""A table of image paths and captions. Rows that name the same image are its several captions."""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clipx.config import option
from clipx.data import Dataset, DataSpec
from clipx.data.source import Bad, BadSample, Sample, Source, split
from clipx.data.webdataset import check_share
from clipx.errors import ConfigError, DataError, require


@option("data")
@dataclass(kw_only=True, slots=True)
class CsvSpec(DataSpec):
    kind: str = "csv"
    path: str | None = None  # the table; image paths in it are relative to its folder
    held_out_path: str | None = None  # a table to evaluate on
    held_out_share: float = 0.05  # share of the images held out where held_out_path is not given; 0 for none
    separator: str = ","  # one character; "\t" for tabs
    image_column: str = "filepath"
    caption_column: str = "caption"
    label_column: str | None = None  # the class of an image, for zero-shot: an index or a class name

    def __post_init__(self) -> None:
        DataSpec.__post_init__(self)
        check_share(self.held_out_share)
        require(len(self._separator) == 1, f'data.separator={self.separator} must be one character, e.g. "," or "\\t"')

    @property
    def _separator(self) -> str:
        return self.separator.replace("\\t", "\t")

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
        if not Path(path).is_file():
            raise ConfigError(f"{key}={path} does not exist or is not a file: give the path of a table")
        columns = (self.image_column, self.caption_column, self.label_column)
        return Table.open(Path(path), self._separator, columns)


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
    def open(cls, path: Path, separator: str, columns: tuple[str, str, str | None]) -> Table:
        """Raises ConfigError for a column that is not there and DataError for a table without a sample."""
        encoded = path.read_bytes()
        captions: dict[str, list[str]] = {}
        labels: dict[str, int | str | None] = {}
        bad: list[Bad] = []
        for line, row in _rows(path, encoded, separator, columns):
            image, caption, label = (None if name is None else (row.get(name) or "").strip() for name in columns)
            reason = _fault(image, caption, label)
            if reason:
                bad.append(Bad(f"{path}:{line}", reason))
                continue
            assert image is not None and caption is not None
            captions.setdefault(image, []).append(caption)
            labels[image] = int(label) if label is not None and label.lstrip("-").isdigit() else label
        if not captions:
            raise DataError(
                f"{path} holds no row with an image and a caption ({len(bad)} rows without): check the file"
            )
        fingerprint = hashlib.sha256(encoded).hexdigest()[:16]
        return cls(str(path.parent), list(captions), list(captions.values()), list(labels.values()), bad, fingerprint)

    @property
    def sizes(self) -> Sequence[int]:
        return (len(self.images),)

    def key(self, index: int) -> str:
        return os.path.join(self.folder, self.images[index])  # noqa: PTH118

    def read(self, index: int) -> Sample:
        try:
            image = Path(self.key(index)).read_bytes()
        except OSError as error:
            raise BadSample(f"image cannot be read: {error.strerror}") from None
        return Sample("", image, self.captions[index], self.labels[index])


def _fault(image: str | None, caption: str | None, label: str | None) -> str | None:
    if not image:
        return "image is missing"
    if not caption:
        return "caption is missing"
    if "�" in caption:
        return "caption is not UTF-8"
    return "label is missing" if label == "" else None


def _rows(
    path: Path, encoded: bytes, separator: str, columns: tuple[str, str, str | None]
) -> list[tuple[int, dict[str, str | None]]]:
    """(line number, row) of each row, after a check of the header."""
    lines = encoded.decode("utf-8-sig", errors="replace").splitlines(keepends=True)
    reader = csv.DictReader(lines, delimiter=separator)
    found = list(reader.fieldnames or [])
    if not found:
        raise DataError(f"{path} is empty: it needs a header line with {columns[0]}{separator}{columns[1]}")
    for option_name, name in zip(("image_column", "caption_column", "label_column"), columns, strict=True):
        if name is not None and name not in found:
            hint = _other_separator(lines[0], separator) or f"name one of them with data.{option_name}=…"
            raise ConfigError(f"data.{option_name}={name} is not a column of {path}: it has {', '.join(found)}; {hint}")
    return [(reader.line_num, row) for row in reader]


def _other_separator(header: str, separator: str) -> str | None:
    if separator in header:
        return None
    for other, name in (("\t", '"\\t"'), (",", '","'), (";", '";"'), ("|", '"|"')):
        if other in header:
            return f"the separator seems to be {name}: give data.separator={name}"
    return None
