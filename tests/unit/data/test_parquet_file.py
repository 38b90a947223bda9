"""Types of the columns of Parquet tables: every reader takes every form of a role, and refuses the rest when it opens."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.table_readers import CAPTIONS, FORMS, READERS, REFUSED, SAMPLES, Reader, parquet
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.parquet_file import IMAGE, INDEX, KEY, LABEL, NUMBER, PATH, TEXT, TEXTS
from clipx.data.source import whole_label
from clipx.errors import ClipxError

pytestmark = pytest.mark.usefixtures("own_cache")
PLACES = [(name, column) for name, reader in READERS.items() for column in reader.roles]


def with_column(reader: Reader, **columns: Any) -> bytes:
    return parquet(pa.table({**reader.columns, **columns}, metadata=reader.metadata or None))


def outcome(reader: Reader, folder: Path, content: bytes) -> Any:
    """Returns what is read, or the class of the error: a reader may need a value in each row."""
    try:
        return reader(folder, content)
    except ClipxError as error:
        return type(error)


ROLES = {
    "image": IMAGE,
    "path": PATH,
    "texts": TEXTS,
    "text": TEXT,
    "key": KEY,
    "uid": KEY,
    "label": LABEL,
    "index": INDEX,
    "number": NUMBER,
}


def test_a_role_takes_the_forms_of_its_values_and_nothing_else() -> None:
    values = {"image": [b"x", None], **{key: [1, None] for key in ("label", "index", "number")}}
    for name, role in ROLES.items():
        taken = {form: make(values.get(name, ["x", None])).type for form, make in FORMS[name].items()}
        assert [form for form, kind in taken.items() if not role.fits(kind)] == [], name
        assert [kind for kind, make in REFUSED[name].items() if role.fits(make().type)] == [], name


@given(place=st.sampled_from(PLACES), data=st.data(), missing=st.sampled_from([(), (), (1,), (0, 5)]))
def test_every_form_of_a_column_is_read_like_the_plain_one(
    place: tuple[str, str], data: st.DataObject, missing: tuple[int, ...], tmp_path: Path
) -> None:
    reader, column = READERS[place[0]], place[1]
    forms = FORMS[reader.roles[column]]
    form = data.draw(st.sampled_from(sorted(forms)))
    values = [None if i in missing else value for i, value in enumerate(reader.columns[column])]
    contents = [with_column(reader, **{column: forms[name](values)}) for name in (next(iter(forms)), form)]
    expected, found = (outcome(reader, tmp_path, content) for content in contents)
    assert found == expected
    assert missing or not isinstance(expected, type), expected


@given(place=st.sampled_from(PLACES), data=st.data())
def test_a_column_of_another_type_is_refused_by_name(
    place: tuple[str, str], data: st.DataObject, tmp_path: Path
) -> None:
    reader, column = READERS[place[0]], place[1]
    refused = REFUSED[reader.roles[column]]
    kind = data.draw(st.sampled_from(sorted(refused)))
    with pytest.raises(ClipxError) as raised:
        reader(tmp_path, with_column(reader, **{column: refused[kind]()}))
    (line,) = str(raised.value).splitlines()
    assert all(part in line for part in (column, kind, reader.name, ", not ")), line


NOT_UTF8 = pa.Array.from_buffers(pa.string(), SAMPLES, pa.array([b"\xff\xfe"] * SAMPLES, pa.binary()).buffers())


@pytest.mark.parametrize("name", ["csv", "parquet", "hf"])
def test_a_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path, name: str) -> None:
    mixed = pa.concat_arrays([NOT_UTF8.slice(0, 2), pa.array(CAPTIONS[2:])])
    for captions in (mixed, mixed.cast(pa.binary()), mixed.cast(pa.binary()).dictionary_encode()):
        found = READERS[name](tmp_path, with_column(READERS[name], caption=captions))
        assert [one[0] for one in found if isinstance(one, tuple)] == [[caption] for caption in CAPTIONS[2:]]
        assert [one for one in found if isinstance(one, str)] == ["caption is not UTF-8"] * 2


def test_labels_are_indices_names_or_missing() -> None:
    indices = [(0, 0), (True, 1), (2.0, 2), (-1.0, -1), (Decimal("3.00"), 3), (2**62, 2**62)]
    missing = [None, math.nan, math.inf, -math.inf, 0.5, Decimal("1.5"), Decimal("NaN"), 1e300, [1], {"a": 1}]
    assert [(cell, whole_label(cell)) for cell, _ in indices] == indices
    assert [cell for cell in missing if whole_label(cell) is not None] == []
    assert [whole_label(name) for name in ("cat", "1", "")] == ["cat", "1", ""], (
        "names, of which parse_label makes indices"
    )


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_a_label_that_is_no_index_is_missing(tmp_path: Path, name: str) -> None:
    labels = [1.0, None, math.nan, 2.5, math.inf, 0.0, 2.0, 3.0]
    found = READERS[name](tmp_path, with_column(READERS[name], label=pa.array(labels)))
    assert sorted(one[1] for one in found if isinstance(one, tuple)) == [0, 1, 2, 3]
    assert [one for one in found if isinstance(one, str)] == ["label is missing"] * 4


@pytest.mark.parametrize(
    "place", [("where by key", "score"), ("weights by key", "key"), ("parquet", "caption"), ("scores", "words")]
)
def test_columns_are_read_by_their_whole_name_once(tmp_path: Path, place: tuple[str, str]) -> None:
    reader, name = READERS[place[0]], place[1]
    plain = reader(tmp_path, reader.valid())
    table = pa.table(reader.columns, metadata=reader.metadata or None)
    nested = table.add_column(0, f"{name}.x", pa.array(["x"] * SAMPLES))
    for other in (nested, table.select(table.column_names[::-1])):
        assert reader(tmp_path, parquet(other)) == plain
    with pytest.raises(ClipxError, match=f"{name}.* names 2 columns: rename one, so that each has its own name"):
        reader(tmp_path, parquet(pa.Table.from_arrays([*table.columns, table[name]], [*table.column_names, name])))
