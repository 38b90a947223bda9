"""Damaged, cut, encrypted and lying tables: every reader accepts them or gives one line, and the process lives on."""

from __future__ import annotations

import io
import os
import random
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from helpers.cases import slow_except
from helpers.payloads import Flag
from helpers.table_readers import READERS, SAMPLES, npy, parquet

from clipx.data.npy import map_array, read_npz
from clipx.errors import ClipxError, DataError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))


TABLES = [name for name, reader in READERS.items() if reader.columns]
ARRAYS = [name for name, reader in READERS.items() if reader.name.endswith(".npy") and name != "features"]
LENIENT = ("features", "sizes.json", "stats")  # a bad sample; files without which the shards are indexed
SHORT = ("manifest", "keep, a mask", "teacher's offsets")  # few of their bytes can change without a fault
TRIES = 24
BY_DEFAULT = [
    "text table",
    "list of shards",
    "csv",
    "parquet",
    "where by key",
    "scores",
    "weights",
    "teacher's text",
    "head",
]


def result(name: str, folder: Path, content: bytes) -> str:
    """Returns the message of the error, or "" if the file is accepted. Any other exception passes."""
    try:
        READERS[name](folder, content)
    except ClipxError as error:
        (line,) = str(error).splitlines()
        return line
    return ""


def damaged(content: bytes, rng: random.Random) -> Iterator[bytes]:
    """Yields the content cut off, and with one or several bytes changed: anywhere, or near the end of a Parquet file."""
    for number in range(TRIES):
        if number % 4 == 0:
            yield content[: rng.randrange(len(content))]
            continue
        changed = bytearray(content)
        start = max(0, len(content) - 1500) if number % 4 == 3 else 0
        for _ in range(rng.choice((1, 1, 8))):
            changed[rng.randrange(start, len(content))] = rng.randrange(256)
        yield bytes(changed)


@pytest.mark.parametrize("name", slow_except(READERS, *BY_DEFAULT))
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content = READERS[name].valid()
    assert result(name, tmp_path, content) == ""
    found = Counter(not result(name, tmp_path, one) for one in damaged(content, random.Random(name)))
    assert found[True] > 0 or name in SHORT, "a reader that refuses everything would pass"
    assert (found[False] == 0) == (name in LENIENT), found


class Kms(pe.KmsClient):
    """Keys in clear text."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return key_bytes

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return wrapped_key


def encrypted(table: pa.Table, plain_footer: bool) -> bytes:
    names = [field.name for field in table.schema if not pa.types.is_nested(field.type)]
    options = {
        "footer_key": "a",
        "column_keys": {"b": names},
        "plaintext_footer": plain_footer,
        "double_wrapping": False,
    }
    factory = pe.CryptoFactory(lambda _: Kms())
    keys = factory.file_encryption_properties(pe.KmsConnectionConfig(), pe.EncryptionConfiguration(**options))
    file = io.BytesIO()
    with pq.ParquetWriter(file, table.schema, encryption_properties=keys) as writer:
        writer.write_table(table)
    return file.getvalue()


@pytest.mark.parametrize("name", slow_except(TABLES, "parquet", "csv"))
def test_unusual_tables_give_one_line(tmp_path: Path, name: str) -> None:
    reader = READERS[name]
    table = pa.table(reader.columns, metadata=reader.metadata or None)
    for plain_footer in (False, True):
        line = result(name, tmp_path, encrypted(table, plain_footer))
        assert "encrypt" in line or "decrypt" in line, line
    empty = io.BytesIO()
    pq.ParquetWriter(empty, table.schema).close()
    for content in (
        empty.getvalue(),
        parquet(table.slice(0, 0)),
        parquet(pa.table({})),
        b"",
        b"PAR1",
        b"PARE",
        b"PAR1" * 4,
    ):
        result(name, tmp_path, content)
    assert result(name, tmp_path, parquet(pa.table({"other": [1]}))), "it lacks the columns"


def headed(header: str, data: bytes = bytes(64)) -> bytes:
    text = header.encode().ljust(53 + -len(header) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + data


SHAPES = (
    "()",
    "(-1,)",
    "(-8, -1)",
    "(1e9,)",
    "(True,)",
    "(8.0,)",
    "(9223372036854775807,)",
    "(0, 9223372036854775807)",
    "(1 << 62, 4)",
)
TYPES = ("'<f8'", "'|V0'", "'|S0'", "'|O'", "[]", "[('a', '|O')]", "('<f8', (2,))", "'<M8[q]'", "5")
TEXTS = (
    "{",
    "[" * 9000,
    "-" * 5000 + "1",
    "\0",
    "{1: 2}",
    "{'descr': '<f8', 'fortran_order': 3, 'shape': (8,)}",
    "  1\n 2",
)


@pytest.mark.parametrize("name", slow_except(ARRAYS, "weights", "teacher's text"))
def test_lying_arrays_give_one_line(tmp_path: Path, name: str) -> None:
    """numpy ends the process (SIGFPE) when it maps a shape of -1 of a type without bytes."""
    flag = Flag(tmp_path / "flag")
    pairs = [("'<f8'", shape) for shape in SHAPES] + [(kind, shape) for kind in TYPES for shape in SHAPES[:2]]
    headers = [f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}" for kind, shape in pairs]
    arrays = [
        np.array(3),
        np.array(["a"] * SAMPLES),
        np.zeros(SAMPLES, "i4,f8"),
        np.ones(SAMPLES, complex),
        np.zeros(SAMPLES, "V16"),
    ]
    fortran = np.asfortranarray(np.ones((SAMPLES, 3)))
    contents = [*map(headed, [*headers, *TEXTS]), *map(npy, [*arrays, fortran]), flag.array(), flag.pickled()]
    assert [i for i, content in enumerate(contents) if not result(name, tmp_path, content)] == []
    assert flag.absent


def test_a_named_pipe_is_no_array(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(DataError, match="cannot be read as .npy .it is no regular file"):
        map_array(tmp_path / "a.npy", "a.npy", "write it by numpy.save")


def test_arrays_in_a_zip_are_bounded(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "weight.npy", headed("{'descr': '<f8', 'fortran_order': False, 'shape': (9437184,), }", bytes(72 << 20))
        )
    with pytest.raises(DataError, match="weight.npy has 75,497,... bytes, more than 64 MiB"):
        read_npz(tmp_path / "bomb.npz", "head", "give another")
