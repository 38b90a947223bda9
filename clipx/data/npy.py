"""Arrays (.npy, .npz) that others have written. Nothing is unpickled, and no header is believed about sizes."""

from __future__ import annotations

import io
import math
import os
import stat
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipx.errors import ClipxError, DataError
from clipx.storage.files import errors_as

_HEADER = 1 << 16  # bytes of a header; numpy reads at most 10,000
_MEMBER = 1 << 26  # bytes of an array in an .npz file, which is read into memory


class Header(NamedTuple):
    """Content of the header of an .npy file. `start`: number of bytes before the data."""

    shape: tuple[int, ...]
    order: str
    dtype: np.dtype[Any]
    start: int


def map_array(path: str | Path, named: str, fix: str, error: type[ClipxError] = DataError) -> NDArray[Any]:
    """Maps an .npy file into memory. Raises `error` if it is damaged, cut off, or holds Python objects."""
    with errors_as(error, f"{named} cannot be read as .npy", fix):
        if not stat.S_ISREG(Path(path).stat().st_mode):  # opening a named pipe would wait for a writer
            raise ValueError("it is no regular file")
        with Path(path).open("rb") as file:
            header = _checked(file.read(_HEADER), os.fstat(file.fileno()).st_size)
        if not math.prod(header.shape):
            return np.empty(header.shape, header.dtype)
        mapped = np.memmap(path, header.dtype, "r", header.start, header.shape, header.order)  # type: ignore[call-overload]
        return mapped.view(np.ndarray)  # type: ignore[no-any-return]


def read_npz(path: str | Path, named: str, fix: str) -> dict[str, NDArray[Any]]:
    """Reads the arrays of an .npz file, each of at most 64 MiB. Raises DataError."""
    found = {}
    with errors_as(DataError, f"{named} cannot be read as .npz", fix), zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.file_size > _MEMBER:
                raise ValueError(f"{member.filename} has {member.file_size:,} bytes, more than {_MEMBER >> 20} MiB")
            content = archive.read(member)
            found[member.filename.removesuffix(".npy")] = parse_array(content)
    return found


def parse_array(content: bytes) -> NDArray[Any]:
    """Returns the array of an .npy file in memory. Raises an error of any type if it is damaged, cut off, or holds
    Python objects."""
    shape, order, dtype, start = _checked(content, len(content))
    array: NDArray[Any] = np.frombuffer(content, dtype, math.prod(shape), start).reshape(shape, order=order)  # type: ignore[call-overload]
    return array


def _checked(head: bytes, size: int) -> Header:
    """Returns the header of a file of `size` bytes. Raises ValueError or others if its data is not what it says."""
    header = header_of(head)
    if header.dtype.hasobject or not header.dtype.itemsize:
        raise ValueError(f"it holds {header.dtype}, not numbers")
    if any(type(length) is not int or length < 0 for length in header.shape):
        raise ValueError(f"shape {header.shape}")
    bytes_said = math.prod(header.shape) * header.dtype.itemsize
    if bytes_said != size - header.start:
        raise ValueError(f"it has {size - header.start:,} bytes of data, and its header says {bytes_said:,}")
    return header


def header_of(encoded: bytes) -> Header:
    """Returns the header of an .npy file. numpy raises errors of several types for a damaged one."""
    digits = 2 if encoded[6:7] == b"\1" else 4  # of the length of the header, in format 1.0 and in later ones
    return _parsed(encoded[: 8 + digits + int.from_bytes(encoded[8 : 8 + digits], "little")])


@lru_cache(maxsize=64)  # one header for all samples of a data set: numpy takes 20 us to read it
def _parsed(header: bytes) -> Header:
    file = io.BytesIO(header)
    version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
    if version == (1, 0):
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)  # type: ignore[no-untyped-call]
    elif version == (2, 0):
        shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(file)  # type: ignore[no-untyped-call]
    else:
        raise ValueError(f"format {version[0]}.{version[1]}, must be 1.0 or 2.0")
    return Header(shape, "F" if fortran_order else "C", dtype, len(header))


def save_array(path: str, array: NDArray[Any]) -> None:
    """Writes an array to a new file."""
    with Path(path).open("xb") as file:
        np.save(file, array, allow_pickle=False)
