"""Quotes in tables of text: what spreadsheets quote, what other programs leave, and what may be both."""

from __future__ import annotations

import csv
import io
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clipx.data.csv import TextTable
from clipx.errors import DataError

SEPARATORS = st.sampled_from(",;\t|")


def read(text: str, separator: str) -> tuple[list[list[str]], list[str]]:
    table = TextTable("t.csv", text, separator)
    rows = table.rows()
    table.names = next(rows)[1]
    return [cells for _, cells in rows], table.notes()


@given(
    separator=SEPARATORS,
    captions=st.lists(st.text('ab"",;\t|\n .é'), min_size=1, max_size=6),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_what_a_spreadsheet_writes_is_read_back(separator: str, captions: list[str], quoting: int, end: str) -> None:
    out, rows = io.StringIO(), [[f"{number}.jpg", caption] for number, caption in enumerate(captions)]
    csv.writer(out, delimiter=separator, quoting=quoting, lineterminator=end).writerows(
        [["filepath", "caption"], *rows]
    )  # type: ignore[arg-type]
    found, notes = read(out.getvalue().replace("\r\n", "\n"), separator)
    assert found == rows
    assert len(notes) == any("\n" in caption for caption in captions), "the lines of a cell are named, nothing else"


@given(separator=SEPARATORS, captions=st.lists(st.text('ab""" .é', min_size=1), min_size=1, max_size=8))
def test_without_quoting_a_row_is_never_swallowed(separator: str, captions: list[str]) -> None:
    assume(not any(re.fullmatch('".*"', caption) for caption in captions))
    rows = [[f"{number}.jpg", caption] for number, caption in enumerate(captions)]
    for order in (1, -1):  # the image first, or last
        text = "".join(f"{separator.join(cells[::order])}\n" for cells in [["filepath", "caption"], *rows])
        table = TextTable("t.csv", text, separator, image=0 if order == 1 else 1)
        found = table.rows()
        table.names = next(found)[1]
        assert [cells[::order] for _, cells in found] == rows
        stray = [number for number, caption in enumerate(captions, 2) if caption.startswith('"')]
        assert table.unquoted == stray


def test_a_cell_that_may_be_rows_is_an_error_that_names_its_line() -> None:
    text = 'id,caption\n1,plain\n2,"20 inch\n3,red\n4,19"\n5,blue\n'
    with pytest.raises(DataError, match=r"t.csv:3: a quote begins a cell of 3 lines, each of which may be a row"):
        read(text, ",")
    found, notes = read(text.replace("3,red", "red"), ",")
    assert (found[1:], notes) == (
        [["2", "20 inch\nred\n4,19"], ["5", "blue"]],
        ["t.csv: 1 cells have several lines, e.g. in line 3"],
    )


def test_a_quote_without_an_end_costs_linear_time() -> None:
    """Each of 2,000 open quotes stands before quotes that end none: a search is as long as a cell may be."""
    text = "a,b\n" + '0.jpg,"open\n' * 2000 + '1.jpg,""\n' * 2000
    found, _ = read(text, ",")
    assert (len(found), found[0], found[-1]) == (4000, ["0.jpg", '"open'], ["1.jpg", ""])
