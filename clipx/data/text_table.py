"""Tables of text (CSV, TSV), with cells quoted as by spreadsheets, or not at all as by other programs.

A quoted cell begins with a quote, and ends with a quote before a separator or the end of a line; two quotes in it are
one. Every other quote is text, as in `20" monitor` and `"Hello" says the sign`. A quoted cell may have several lines,
unless one of them is a row: then its first quote is text, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from clipx.data.image_format import IMAGES
from clipx.errors import DataError

_MAX_CELL = 1 << 17  # characters of a quoted cell


@dataclass(slots=True)
class TextTable:
    r"""Rows of a text with \n as ends of lines. `path`: its file, for errors."""

    path: str
    text: str
    separator: str
    names: Sequence[str] = ()
    """Cells of the first row."""

    image: int = 0
    """Place of the cells with paths of images, by which rows are known."""

    unquoted: list[int] = field(default_factory=list)
    """Lines of the cells so far that begin with a quote and are text."""

    spanning: list[int] = field(default_factory=list)
    """First lines of the cells so far that have several lines."""

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
