"""Parquet files that others have written: the types of columns in one place, and damage as one line.

Each reader names the role of a column, which takes a type in all its forms: categories, views and extensions are read
as the values that they hold, and bytes in the role of texts as UTF-8. A number is never a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clipx.data.source import whole_label
from clipx.errors import ClipxError, ConfigError, DataError
from clipx.storage.failure import one_line
from clipx.storage.files import errors_as

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pyarrow import Array, DataType, RecordBatch, Schema
    from pyarrow.parquet import ParquetFile

MAGIC, ENCRYPTED = b"PAR1", b"PARE"  # first and last bytes of a file: plain, and with an encrypted footer

FIX = "give a complete Parquet file that is not encrypted"

_VIEWS = {"string_view": "string", "binary_view": "binary"}  # names: pyarrow 15 lacks the types
_BINARY = {"string": "binary", "large_string": "large_binary"}
_HELD = {
    **dict.fromkeys(_BINARY, "text"),
    **dict.fromkeys(_BINARY.values(), "bytes"),
    "null": "nothing",
    "bool": "bool",
}
_SHOWN = 20  # names of columns in a message


# ---------------------------------------------------------------------------------------------------------- types


def plain(kind: DataType) -> DataType:
    """Returns the type of the values of a column: without categories, views, extensions and lists of a fixed size."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return plain(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return plain(kind.value_type)
    if _is_list(kind):
        value = plain(kind.value_type)
        fixed = pa.types.is_fixed_size_list(kind)
        return kind if value == kind.value_type and not fixed else pa.list_(value)
    return pa.type_for_alias(_VIEWS[str(kind)]) if str(kind) in _VIEWS else kind


def _is_list(kind: DataType) -> bool:
    """Returns whether each value is a list. Not a view of lists, of which pyarrow's casts are damaged."""
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def held(kind: DataType) -> str:
    """Returns what the values of a column are: text, bytes, image (a struct with bytes), whole (a number), number,
    bool, nothing (as pandas writes a column that is empty in one of several files), a list of these, or other."""
    from pyarrow import types

    found = plain(kind)
    if _is_list(found):
        return f"list of {held(found.value_type)}"
    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return "image" if place >= 0 and held(kind.field(place).type) == "bytes" else "other"
    if types.is_integer(found):
        return "whole"
    return "number" if types.is_floating(found) or types.is_decimal(found) else _HELD.get(str(found), "other")


def is_string(kind: DataType) -> bool:
    return held(kind) == "text"


@dataclass(frozen=True, slots=True)
class Role:
    """Use of a column by a reader. `holds`: its values, for messages. `taken`: results of `held`; (): all of them."""

    holds: str
    taken: Sequence[str] = ()

    def fits(self, kind: DataType) -> bool:
        """Returns whether the values of this type have the role."""
        return not self.taken or held(kind) in self.taken


_TEXT = ("text", "bytes", "nothing")
ANY = Role("a value")
IMAGE = Role("the bytes of images", ("bytes", "image"))
PATH = Role("paths", ("text",))
TEXT = Role("texts", _TEXT)
TEXTS = Role("texts or lists of texts", (*_TEXT, *(f"list of {kind}" for kind in _TEXT)))
LABEL = Role("indices or names", (*_TEXT, "whole", "number", "bool"))
KEY = Role("texts", (*_TEXT, "whole"))
INDEX = Role("whole numbers", ("whole",))
INDICES = Role("lists of whole numbers", ("list of whole",))
NUMBER = Role("numbers", ("whole", "number", "nothing"))


def check_type(
    schema: Schema, name: str, role: Role, url: str, named: str, fix: str, error: type[ClipxError] = DataError
) -> None:
    """Raises `error` if a column holds values of another type, or if its name is that of several columns. `named`: the
    column in the message, such as data.caption_column=text."""
    if (count := schema.names.count(name)) != 1:
        raise error(f"{named} of {url} names {count} columns: rename one, so that each has its own name")
    kind = schema.field(name).type
    if not role.fits(kind):
        raise error(f"{named} of {url} holds {one_line(str(kind))}, not {role.holds}: {fix}")


def shown(names: Sequence[str]) -> str:
    """Returns the names of columns for a message."""
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


# --------------------------------------------------------------------------------------------------------- reading


def open_parquet(source: Any, named: str, **options: Any) -> ParquetFile:
    """Opens a file by its path or object. Raises DataError if it is damaged, cut off, encrypted or not Parquet.
    `options`: of pyarrow's ParquetFile."""
    import pyarrow.parquet as pq

    # By default pyarrow holds all bytes of a column until the last batch has been read, and checks no page.
    options = {"pre_buffer": False, "page_checksum_verification": True, **options}
    with errors_as(DataError, f"{named} cannot be read as Parquet", FIX):
        return pq.ParquetFile(source, **options)


def batches(file: ParquetFile, names: Sequence[str], named: str, size: int, **options: Any) -> Iterator[RecordBatch]:
    """Yields some columns in the order of `names`, with the plain types of their values. `options`: of pyarrow's
    iter_batches. Raises DataError if a page is damaged or encrypted."""
    import pyarrow as pa

    wanted = list(dict.fromkeys(names))
    with errors_as(DataError, f"{named} cannot be read as Parquet", FIX):
        for batch in file.iter_batches(size, columns=wanted, **options):
            yield pa.record_batch([plain_column(batch[name]) for name in wanted], wanted)


def plain_column(column: Array) -> Array:
    """Returns a column with the plain type of its values."""
    return column.cast(plain(column.type))


def comparable(column: Array) -> Array:
    """Returns a column whose texts can be compared with texts. pyarrow raises an error for bytes that are not UTF-8."""
    import pyarrow as pa

    return plain_column(column).cast(pa.large_string()) if held(column.type) == "bytes" else plain_column(column)


def encoded(column: Array) -> Array:
    """Returns the UTF-8 bytes of texts or of whole numbers."""
    import pyarrow as pa

    found = plain_column(column)
    return (found.cast(pa.string()) if held(found.type) == "whole" else found).cast(pa.large_binary())


def cells(column: Array) -> list[Any]:
    """Returns the values of a column. Bytes of a text that are not UTF-8 become surrogates, as in names of files."""
    found = plain_column(column)
    return [_decoded(value) for value in found.cast(_undecoded(found.type)).to_pylist()]


def _undecoded(kind: DataType) -> DataType:
    """Returns the type with bytes in place of texts: of a text that is not UTF-8, pyarrow raises an error."""
    import pyarrow as pa

    if _is_list(kind):
        return pa.list_(_undecoded(kind.value_type))
    return pa.type_for_alias(_BINARY[str(kind)]) if str(kind) in _BINARY else kind


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return [_decoded(one) for one in value] if isinstance(value, list) else value


def texts_of(cell: Any) -> list[str]:
    """Returns the texts of a cell, a text or a list of texts, without missing and blank ones."""
    return [text for text in (cell if isinstance(cell, list) else [cell]) if text and not text.isspace()]


def images(column: Array) -> list[bytes | None]:
    """Returns the bytes of images, from structs {bytes, …} too."""
    import pyarrow.compute as pc

    found = pc.struct_field(column, "bytes") if held(column.type) == "image" else column
    return plain_column(found).to_pylist()  # type: ignore[no-any-return]


def numbers(column: Array) -> NDArray[np.float64]:
    """Returns numbers as float64, NaN for a missing one."""
    import pyarrow as pa

    found: NDArray[np.float64] = plain_column(column).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return found


def whole_numbers(column: Array) -> NDArray[np.int64]:
    """Returns whole numbers as int64, -1 for a missing one or one above its range."""
    import pyarrow as pa

    whole = plain_column(column).cast(pa.int64(), safe=False).fill_null(-1)
    found: NDArray[np.int64] = whole.to_numpy(zero_copy_only=False)
    return found


# ----------------------------------------------------------------------------------------------- rows with captions


ColumnNames = tuple[str, Sequence[str], str | None]  # names of the columns of images, captions and labels


def check_rows(schema: Schema, columns: ColumnNames, image: Role, url: str, group: str, fix: str) -> None:
    """Raises ConfigError if a column has values of another type. `group`: of the options. `fix`: for the images."""
    image_column, caption_columns, label_column = columns
    other = "name another column"
    roles = [("image_column", image_column, image, fix)]
    roles += [("caption_column", name, TEXTS, other) for name in caption_columns]
    roles += [] if label_column is None else [("label_column", label_column, LABEL, other)]
    for key, name, role, advice in roles:
        check_type(schema, name, role, url, f"{group}.{key}={name}".lstrip("."), advice, ConfigError)


def rows(batch: RecordBatch, columns: ColumnNames) -> Iterator[tuple[Any, Mapping[str, Any], int | str | None]]:
    """Yields (image or path, captions by column, label) of each row; None for what is missing."""
    image_column, caption_columns, label_column = columns
    image = batch[image_column]
    found = cells(image) if is_string(image.type) else images(image)
    captions = {name: cells(batch[name]) for name in caption_columns}
    labels = cells(batch[label_column]) if label_column is not None else [None] * len(batch)
    for i, label in enumerate(labels):
        yield found[i], {name: texts[i] for name, texts in captions.items()}, whole_label(label)
