"""All readers of tables (Parquet, .npy, .npz) and lists that others have written, each on a small valid file."""

from __future__ import annotations

import datetime
import hashlib
import io
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clipx.data.class_names import read_names
from clipx.data.csv import CsvSpec
from clipx.data.shards.urls import expand
from clipx.data.source import BadSample, Source
from clipx.data.webdataset import WebDatasetSpec
from clipx.extra.curate.entries import read_entries
from clipx.extra.curate.select import SelectSpec, select
from clipx.extra.curate.writer import load_head
from clipx.extra.hf.parquet import ParquetSpec
from clipx.extra.hf.source import HfSpec
from clipx.extra.prepare.command import PrepareSpec, prepare
from clipx.teacher.stored import MANIFEST, StoredTeachers, caption_hash
from helpers.samples import img2dataset, jpeg, write_tar

SAMPLES = 8
_WIDTH = 4
_number = itertools.count()


def uid(i: int) -> str:
    return hashlib.md5(str(i).encode(), usedforsecurity=False).hexdigest()


KEYS = [f"{i:09d}" for i in range(SAMPLES)]
IMAGES = [jpeg(i) for i in range(SAMPLES)]
CAPTIONS = [f"caption {i}" for i in range(SAMPLES)]


def texts(source: Source) -> list[Any]:
    """Returns (captions, label) of each sample, or the reason why it is unusable. Other errors pass."""
    found: list[Any] = []
    for i in range(sum(source.sizes)):
        try:
            sample = source.read(i)
            assert all(isinstance(caption, str) for caption in sample.captions)
            assert sample.label is None or type(sample.label) in (int, str)
            found.append((list(sample.captions), sample.label))
        except BadSample as error:
            found.append(str(error))
    return [*found, *(record.reason for record in source.bad)]


@dataclass(frozen=True)
class Reader:
    """A reader of files with the name `suffix`. `columns` of a valid Parquet file, or `content` of another valid file.

    `roles`: of columns. `read(path)`: returns what was read, of a file in a folder of its own.
    """

    read: Callable[[Path], Any]
    columns: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    content: Callable[[], bytes] = bytes
    name: str = "t.parquet"
    metadata: dict[str, str] = field(default_factory=dict)

    def valid(self, **options: Any) -> bytes:
        """Returns a valid file."""
        return (
            parquet(pa.table(self.columns, metadata=self.metadata or None), **options)
            if self.columns
            else self.content()
        )

    def __call__(self, folder: Path, content: bytes) -> Any:
        """Reads a file with this content in a new folder."""
        path = folder / str(next(_number)) / self.name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        return self.read(path)


def parquet(table: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=5, **options)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def _shards(path: Path, beside: bool = False, **options: Any) -> list[Any]:
    """Opens a shard that all files share. `beside`: by a link next to the file."""
    tar = path.parents[1] / "00000.tar"
    if not tar.exists():
        members = dict(img2dataset(range(SAMPLES)))
        meta = {f"{KEYS[i]}.json": json.dumps({"uid": uid(i)}).encode() for i in range(SAMPLES)}
        write_tar(tar, {**members, **meta}.items())
    if beside:
        (path.parent / "00000.tar").symlink_to(tar)
        tar = path.parent / "00000.tar"
    return texts(WebDatasetSpec(name="x", shards=str(tar), held_out_share=0.0, **options).open().train)


def _csv(path: Path, **options: Any) -> list[Any]:
    for i in range(SAMPLES):
        (path.parent / f"{i}.jpg").write_bytes(IMAGES[i])
    return texts(CsvSpec(name="x", path=str(path), held_out_share=0.0, **options).open().train)


def _parquet(path: Path) -> list[Any]:
    spec = ParquetSpec(name="x", path=str(path), label_column="label", held_out_share=0.0)
    return texts(spec.open().train)


def _hf(path: Path) -> list[Any]:
    spec = HfSpec(name="x", path=str(path.parent), image_column="image", caption_column="caption", held_out_share=0.0)
    return texts(spec.open().train)


def _hf_found(path: Path) -> list[Any]:
    return texts(HfSpec(name="x", path=str(path.parent), held_out_share=0.0).open().train)


def _prepare(path: Path) -> list[str]:
    options = {"image_column": "image", "caption_column": "caption", "label_column": "label", "processes": 1}
    prepare(PrepareSpec(source=str(path), out=str(path.parent / "out"), **options))
    return sorted(found.name for found in (path.parent / "out").iterdir())


def _select(path: Path) -> list[int]:
    out = path.parent / "ids.npy"
    select(
        SelectSpec(scores=str(path), out=str(out), least={"similarity": 0.1}, scripts=["Latin"], without=["near"], by="words",
                   top=0.9, per_cluster=True, balance=3)
    )  # fmt: skip
    return np.load(out).tolist()


def _select_keys(path: Path) -> str:
    out = path.parent / "ids.txt"
    select(SelectSpec(scores=str(path), out=str(out)))
    return out.read_text()


def _within(path: Path) -> list[int]:
    scores, out = path.parent / "scores", path.parent / "ids.npy"
    scores.mkdir()
    (scores / "scores.parquet").write_bytes(parquet(pa.table(SCORES)))
    select(SelectSpec(scores=str(scores), out=str(out), within=str(path)))
    return np.load(out).tolist()


def _forms(*kinds: pa.DataType) -> dict[str, Callable[[Any], Any]]:
    return {str(kind): lambda values, kind=kind: pa.array(values, kind) for kind in kinds}  # type: ignore[misc]


def _bytes(kind: pa.DataType) -> Callable[[Any], Any]:
    return lambda values: pa.array([None if value is None else value.encode() for value in values], kind)


TEXT = {
    **_forms(pa.string(), pa.large_string(), pa.string_view()),
    **{str(kind): _bytes(kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())},
    "category": lambda values: pa.array(values, pa.string()).dictionary_encode(),
    "category of bytes": lambda values: _bytes(pa.binary())(values).dictionary_encode(),
    "json": lambda values: pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(values, pa.string())),
}
LISTS = {
    "list": lambda values: pa.array([None if value is None else [value] for value in values], pa.list_(pa.string())),
    "large list of bytes": lambda values: LISTS["list"](values).cast(pa.large_list(pa.binary())),
    "list of one": lambda values: LISTS["list"](values).cast(pa.list_(pa.string(), 1)),
}
WHOLE = {
    **_forms(pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64()),
    "category of numbers": lambda values: pa.array(values, pa.int64()).dictionary_encode(),
}
NUMBER = {
    **WHOLE,
    **_forms(pa.float32(), pa.float64()),
    "half": lambda values: pa.array(values, pa.float32()).cast(pa.float16()),
    "decimal": lambda values: pa.array(
        [None if value is None else Decimal(value) for value in values], pa.decimal128(9, 2)
    ),
}


def _text_of_numbers(form: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: form([None if value is None else str(value) for value in values])


FORMS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "texts": {**TEXT, **LISTS},
    "text": TEXT,
    "key": TEXT,
    "uid": TEXT,
    "path": {name: TEXT[name] for name in ("string", "large_string", "string_view", "category", "json")},
    "label": {**NUMBER, **{name: _text_of_numbers(form) for name, form in TEXT.items()}},
    "index": WHOLE,
    "number": NUMBER,
    "image": {
        **_forms(pa.binary(), pa.large_binary(), pa.binary_view()),
        "category": lambda values: pa.array(values, pa.binary()).dictionary_encode(),
        "struct": lambda values: pa.array([{"bytes": value, "path": "x"} for value in values]),
        "struct of views": lambda values: pa.array(
            [{"bytes": value} for value in values], pa.struct([("bytes", pa.binary_view())])
        ),
    },
}
"""Forms in which a column of a role may be stored, each a function of plain values. The first one is the plain one."""

_STRUCT = {
    "struct": lambda: pa.array([{"text": "x"}] * SAMPLES),
    "list<element: struct": lambda: pa.array([[{"text": "x"}]] * SAMPLES),
    "list<element: list": lambda: pa.array([[["x"]]] * SAMPLES),
    "map": lambda: pa.array([[("x", "y")]] * SAMPLES, pa.map_(pa.string(), pa.string())),
    "date32": lambda: pa.array([datetime.date(2020, 1, 1)] * SAMPLES),
    "timestamp": lambda: pa.array([datetime.datetime(2020, 1, 1)] * SAMPLES),
    "fixed_size_binary": lambda: pa.array([b"12"] * SAMPLES, pa.binary(2)),
}
_NUMBERS = {"int64": lambda: pa.array(range(SAMPLES)), "double": lambda: pa.array([float("nan")] * SAMPLES)}
_STRINGS = {"string": lambda: pa.array(["x"] * SAMPLES), "binary": lambda: pa.array([b"1"] * SAMPLES)}
REFUSED: dict[str, dict[str, Callable[[], Any]]] = {
    "texts": {**_STRUCT, **_NUMBERS, "list<element: int64": lambda: pa.array([[1]] * SAMPLES)},
    "text": {**_STRUCT, **_NUMBERS},
    "key": {**_STRUCT, "double": _NUMBERS["double"]},
    "uid": {**_STRUCT, "double": _NUMBERS["double"]},
    "path": {**_STRUCT, **_NUMBERS, "binary": _STRINGS["binary"]},
    "label": _STRUCT,
    "index": {**_STRUCT, **_STRINGS, "double": _NUMBERS["double"]},
    "number": {**_STRUCT, **_STRINGS},
    "image": {**_STRUCT, **_NUMBERS},
}
"""Types that a role refuses, by the beginning of their names in the message."""

SCORES: dict[str, Any] = {
    "index": range(SAMPLES),
    "key": KEYS,
    "reason": pa.array([None] * SAMPLES, pa.string()),
    "similarity": range(SAMPLES),
    "words": range(SAMPLES),
    "script": ["Latin"] * SAMPLES,
    "near_duplicate_of": [None] * SAMPLES,
    "cluster": [0] * SAMPLES,
    "entries": pa.array([[i % 2] for i in range(SAMPLES)], pa.list_(pa.int32())),
}
ROWS = {"image": IMAGES, "caption": CAPTIONS, "label": [i % 3 for i in range(SAMPLES)]}
ROW_ROLES = {"image": "image", "caption": "texts", "label": "label"}


class Embedded:
    """A training source with the fingerprint and size of the stored embeddings."""

    fingerprint = "data"
    sizes = (SAMPLES,)


_ARRAYS: dict[str, Any] = {
    "image": np.ones((SAMPLES, 2, _WIDTH), np.float16),
    "text": np.ones((SAMPLES, _WIDTH), np.float16),
    "captions": np.array([caption_hash(caption) for caption in CAPTIONS], np.uint64),
    "offsets": np.arange(SAMPLES + 1),
    "boxes": np.ones((SAMPLES, 2, 4), np.int32),
}


def _teacher(name: str) -> Callable[[Path], Any]:
    def read(path: Path) -> list[Any]:
        files = {}
        for other, array in _ARRAYS.items():
            file = path.with_name(f"00000.{other}.npy")
            if other != name:
                file.write_bytes(npy(array))
            files[file.name] = [file.stat().st_size, ""]
        manifest = {
            "version": 1, "format": "npy", "data": "data", "weights": "w", "dtype": "float16", "samples": SAMPLES,
            "samples_per_shard": SAMPLES, "width": _WIDTH, "scale": 1.0, "shards": [{"files": files}], "views": 2,
            "views_seed": 0, "crop_scale": [0.5, 1.0],
        }  # fmt: skip
        (path.parent / MANIFEST).write_text(json.dumps(manifest))
        options = {"crop_scale": [0.5, 1.0]}
        stored = StoredTeachers.open([str(path.parent)], [None], Embedded(), options)  # type: ignore[arg-type]
        found: list[Any] = []
        for i in range(SAMPLES):
            try:
                found.append(
                    [stored.teachers[0].box(i, 1), *(x.tolist() for x in stored.teachers[0].rows(i, CAPTIONS[i], 1))]
                )
            except BadSample as error:
                found.append(str(error))
        return found

    return read


def _features(path: Path) -> list[Any]:
    from clipx.data.images import FeatureReader

    try:
        return FeatureReader(_WIDTH).load_for_evaluation(path.read_bytes()).tolist()
    except BadSample as error:
        return [str(error)]


def _npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, weight=np.ones(_WIDTH, np.float32), bias=np.zeros(1, np.float32))
    return file.getvalue()


def _head(path: Path) -> list[float]:
    head = load_head(str(path), _WIDTH)
    return [*head.weight_D.tolist(), head.bias]


def _by(by: str, column: str, values: Any) -> dict[str, Any]:
    ids = {"key": KEYS, "uid": [uid(i) for i in range(SAMPLES)], "index": range(SAMPLES)}
    return {column: values, by: ids[by]} if by else {column: values}


_LINE = '{0}.jpg,"a ""small"" picture, number {0}"\n'
READERS: dict[str, Reader] = {
    "csv": Reader(
        lambda path: _csv(path, label_column="label"),
        {"filepath": [f"{i}.jpg" for i in range(SAMPLES)], "caption": CAPTIONS, "label": ROWS["label"]},
        {"filepath": "path", "caption": "texts", "label": "label"},
    ),
    "parquet": Reader(_parquet, ROWS, ROW_ROLES),
    "hf": Reader(_hf, {name: ROWS[name] for name in ("image", "caption")}, {"image": "image", "caption": "texts"}),
    "hf, columns found": Reader(_hf_found, {name: ROWS[name] for name in ("image", "caption")}),
    "prepare": Reader(_prepare, ROWS, ROW_ROLES),
    "caption table": Reader(
        lambda path: _shards(path, caption_table="shards", caption_key={"txt": 1, "table.caption": 1}, beside=True),
        {"caption": CAPTIONS, "key": KEYS, "status": ["success"] * SAMPLES},
        {"caption": "texts", "key": "key", "status": "text"},
        name="00000.parquet",
    ),
    "sidecar table": Reader(
        lambda path: _shards(path, table="shards", where="score > 2", beside=True),
        {"score": range(SAMPLES), "key": KEYS, "status": ["success"] * SAMPLES},
        {"key": "key", "status": "text"},
        name="00000.parquet",
    ),
    **{
        f"where by {by or 'order'}": Reader(
            lambda path: _shards(path, table=str(path), where="score > 2"),
            _by(by, "score", range(SAMPLES)),
            {by: by} if by else {},
            metadata={"clipx.score": "1"} if by == "index" else {},
        )
        for by in ("", "key", "uid", "index")
    },
    **{
        f"keep by {by}": Reader(lambda path: _shards(path, keep=str(path)), {by: _by(by, "", ())[by]}, {by: by})
        for by in ("key", "uid", "index")
    },
    **{
        f"weights by {by or 'order'}": Reader(
            lambda path: _shards(path, weights=str(path)),
            _by(by, "weight", range(SAMPLES)),
            {"weight": "number", **({by: by} if by else {})},
        )
        for by in ("", "key", "uid", "index")
    },
    "scores": Reader(
        _select,
        SCORES,
        {
            "index": "index",
            "similarity": "number",
            "words": "number",
            "script": "text",
            "near_duplicate_of": "number",
            "cluster": "number",
        },
        name="scores.parquet",
    ),
    "keys of scores": Reader(_select_keys, SCORES, {"key": "key"}, name="scores.parquet"),
    "within, a table": Reader(_within, {"index": range(SAMPLES)}, {"index": "index"}),
    "within": Reader(_within, content=lambda: npy(np.arange(SAMPLES)), name="t.npy"),
    "keep, indices": Reader(lambda p: _shards(p, keep=str(p)), content=lambda: npy(np.arange(SAMPLES)), name="t.npy"),
    "keep, a mask": Reader(
        lambda p: _shards(p, keep=str(p)), content=lambda: npy(np.arange(SAMPLES) > 2), name="t.npy"
    ),
    "keep, uids": Reader(
        lambda p: _shards(p, keep=str(p)),
        content=lambda: npy(
            np.sort(np.array([(int(u[:16], 16), int(u[16:], 16)) for u in map(uid, range(SAMPLES))], "u8,u8"))
        ),
        name="t.npy",
    ),
    "weights": Reader(lambda p: _shards(p, weights=str(p)), content=lambda: npy(np.arange(SAMPLES) / 2), name="t.npy"),
    **{
        f"teacher's {name}": Reader(
            _teacher(name), content=lambda name=name: npy(_ARRAYS[name]), name=f"00000.{name}.npy"
        )  # type: ignore[misc]
        for name in _ARRAYS
    },
    "features": Reader(_features, content=lambda: npy(np.ones(_WIDTH, np.float32)), name="t.npy"),
    "head": Reader(_head, content=_npz, name="t.npz"),
    "manifest": Reader(
        lambda p: _shards(p, manifest=str(p)),
        content=lambda: json.dumps(
            {"version": 1, "caption_key": "txt", "shards": [{"url": "00000.tar", "samples": SAMPLES, "digest": "0"}]}
        ).encode(),
        name="t.json",
    ),
    "sizes.json": Reader(
        lambda p: _shards(p, beside=True),
        content=lambda: json.dumps({"00000.tar": SAMPLES}).encode(),
        name="sizes.json",
    ),
    "stats": Reader(
        lambda p: _shards(p, beside=True),
        content=lambda: json.dumps({"successes": SAMPLES}).encode(),
        name="00000_stats.json",
    ),
    "text table": Reader(
        _csv, content=lambda: "".join(["filepath,caption\n", *map(_LINE.format, range(SAMPLES))]).encode(), name="t.csv"
    ),
    "keys, a text": Reader(
        lambda p: _shards(p, keep=str(p)), content=lambda: "\n".join(KEYS[:5]).encode(), name="t.txt"
    ),
    "list of shards": Reader(
        lambda p: expand(f"@{p}", "data.shards"),
        content=lambda: b"\n".join(b"%d.tar" % i for i in range(9)),
        name="t.txt",
    ),
    "names": Reader(lambda p: read_names(str(p), "x"), content=lambda: "\n".join(CAPTIONS).encode(), name="t.txt"),
    "entries": Reader(lambda p: read_entries(str(p)), content=lambda: "\n".join(CAPTIONS).encode(), name="t.txt"),
}
