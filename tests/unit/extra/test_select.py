"""Selection of training samples: ids, conditions, tables and weights on real shards; `clipx.select`."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.runs import compose
from helpers.samples import captions, jpeg, read_all, write_tar
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.csv import CsvSpec
from clipx.data.folder import FolderSpec
from clipx.data.image_files import ImageFiles
from clipx.data.order import WeightedOrder
from clipx.data.selection.expression import Predicate
from clipx.data.selection.files import INDEXED
from clipx.data.selection.spec import SelectionSpec
from clipx.data.selection.tables import ID, WEIGHTED, IdSet, is_sorted, write_sorted
from clipx.data.source import BadSample, whole_index
from clipx.data.spec import Dataset
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import ConfigError, DataError
from clipx.extra.curate.select import select
from clipx.extra.hf.parquet import ParquetSpec
from clipx.extra.hf.source import HfSpec

PER_SHARD, SHARDS = 10, 3
TOTAL = PER_SHARD * SHARDS
pytestmark = pytest.mark.usefixtures("own_cache")


def uid(i: int) -> str:
    return hashlib.md5(str(i).encode(), usedforsecurity=False).hexdigest()


def write_shards(folder: Path, without_caption: tuple[int, ...] = ()) -> str:
    for shard in range(SHARDS):
        members = []
        for i in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
            meta = {"similarity": i / 100, "width": 100 + i, "uid": uid(i), "lang": "de" if i % 2 else "en"}
            members += [(f"{i:09d}.jpg", jpeg(i)), (f"{i:09d}.json", json.dumps(meta).encode())]
            members += [(f"{i:09d}.txt", b"" if i in without_caption else f"caption {i}".encode())]
        write_tar(folder / f"{shard:05d}.tar", members)
    return f"{folder}/*.tar"


def write_tables(folder: Path) -> None:
    """Writes tables as img2dataset does, with rows of images that could not be downloaded."""
    for shard in range(SHARDS):
        rows = [
            {"key": f"{i:09d}", "status": "success", "similarity": i / 100}
            for i in range(PER_SHARD * shard, PER_SHARD * (shard + 1))
        ]
        rows.insert(3, {"key": "failed", "status": "failed_to_download", "similarity": 1.0})
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{shard:05d}.parquet")


def opened(shards: str, **options: Any) -> Dataset:
    return WebDatasetSpec(name="mine", shards=shards, **{"held_out_share": 0.0, **options}).open()


def chosen(shards: str, **options: Any) -> list[int]:
    return [int(text.removeprefix("caption ")) for text in captions(opened(shards, **options).train)]


def datacomp(uids: list[str]) -> np.ndarray[Any, Any]:
    """Returns the ids of samples in the format of DataComp."""
    pairs = [(int(one[:16], 16), int(one[16:32], 16)) for one in uids]
    found = np.array(pairs, np.dtype("u8,u8"))
    found.sort()
    return found


# ------------------------------------------------------------------------------------------------------- ids


def test_ids_of_every_format_select_the_same_samples(tmp_path: Path) -> None:
    shards, wanted = write_shards(tmp_path), [3, 7, 12, 29]
    keys, uids = [f"{i:09d}" for i in wanted], [uid(i) for i in wanted]
    np.save(tmp_path / "index.npy", np.array(wanted[::-1]))
    np.save(tmp_path / "mask.npy", np.isin(np.arange(TOTAL), wanted))
    np.save(tmp_path / "uid.npy", datacomp(uids))
    np.save(tmp_path / "unsorted.npy", datacomp(uids)[::-1])
    (tmp_path / "key.txt").write_text("\n".join(keys[::-1]))
    (tmp_path / "uid.txt").write_text("\n".join(uids))
    for name, values in (("index", wanted), ("key", keys), ("uid", uids)):
        pq.write_table(pa.table({"other": [0] * 4, name: values}), tmp_path / f"{name}.parquet")
    files = sorted(path for path in tmp_path.iterdir() if path.suffix in (".npy", ".txt", ".parquet"))
    assert len(files) == 9
    found = {path.name: opened(shards, keep=str(path)) for path in files}
    assert all(captions(data.train) == [f"caption {i}" for i in wanted] for data in found.values())
    assert len({data.train.fingerprint for data in found.values()}) == 1, "the samples decide, not the format"
    assert found["key.txt"].train.sizes == [2, 1, 1]


def test_unknown_and_repeated_ids_are_counted(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    keys, indices = tmp_path / "keys.txt", tmp_path / "ids.npy"
    keys.write_text("000000001\nmissing\n000000001\n000000002\n")
    assert opened(shards, keep=str(keys)).notes == [
        "2 of 30 training samples are selected",
        f"data.keep={keys}: 1 of 3 keys are not in the data",
        f"data.keep={keys}: 1 keys are repeated",
    ]
    np.save(indices, np.array([20, 3, 3, -1, 500, 3, 11]))
    data = opened(shards, keep=str(indices))
    assert captions(data.train) == ["caption 3", "caption 11", "caption 20"]
    assert data.notes == [
        "3 of 30 training samples are selected",
        f"data.keep={indices}: 2 of 7 indices are not in the data",
        f"data.keep={indices}: 2 indices are repeated",
    ]
    keys.write_text("no\nsuch")
    with pytest.raises(ConfigError, match="no training sample is selected .*2 of 2 keys are not in the data"):
        opened(shards, keep=str(keys))


def test_held_out_samples_are_not_selected(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    np.save(tmp_path / "ids.npy", np.arange(5, 25))
    for share in (0.0, 0.1, 0.4):
        plain, data = (opened(shards, held_out_share=share, **more) for more in ({}, {"keep": f"{tmp_path}/ids.npy"}))
        assert captions(data.train) == [c for c in captions(plain.train) if 5 <= int(c.split()[1]) < 25], share
        if share:
            assert data.held_out is not None and plain.held_out is not None
            assert captions(data.held_out) == captions(plain.held_out), share


def test_an_evaluation_reads_all_samples(tmp_path: Path) -> None:
    data = WebDatasetSpec(name="mine", shards=write_shards(tmp_path), where="width < 105").open_for_evaluation()
    assert data.held_out is not None and len(captions(data.held_out)) == TOTAL


def csv_of(folder: Path) -> SelectionSpec:
    rows = [f"{i}.jpg,caption {i}\n" for i in range(TOTAL)]
    (folder / "t.csv").write_text("filepath,caption\n" + "".join(rows))
    return CsvSpec(name="mine", path=f"{folder}/t.csv")


def folder_of(folder: Path) -> SelectionSpec:
    return FolderSpec(name="mine", path=f"{folder}/classes")


def parquet_of(folder: Path) -> SelectionSpec:
    rows = [{"image": jpeg(i), "caption": f"caption {i}"} for i in range(TOTAL)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "images.parquet", row_group_size=4)
    return ParquetSpec(name="mine", path=f"{folder}/images.parquet")


def hf_of(folder: Path) -> SelectionSpec:
    write_shards(folder / "hf")
    return HfSpec(name="mine", path=f"{folder}/hf")


@pytest.mark.parametrize("make", [csv_of, folder_of, parquet_of, hf_of], ids=["csv", "folder", "parquet", "hf"])
def test_every_source_with_numbered_samples_selects(make: Callable[[Path], SelectionSpec], tmp_path: Path) -> None:
    for i in range(TOTAL):
        for path in (tmp_path / f"{i}.jpg", tmp_path / f"classes/class {i % 3}/{i}.jpg"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(i))
    spec, wanted = make(tmp_path), [3, 7, 12, 20, 29]
    whole = replace(spec, held_out_share=0.0).open().train  # type: ignore[call-arg]
    images = [whole.read(i).image for i in range(TOTAL)]
    np.save(tmp_path / "keep.npy", wanted)
    mask = pa.array([i in wanted for i in range(TOTAL)])
    np.save(tmp_path / "mask.npy", mask)
    scores = pa.table({"index": range(TOTAL), "good": mask}, metadata={INDEXED: b"1"})
    pq.write_table(scores.take(pa.array(range(TOTAL)[::-1])), tmp_path / "scores.parquet")
    np.save(tmp_path / "weights.npy", np.asarray(mask, dtype=float))
    selections = [{"keep": "keep.npy"}, {"keep": "mask.npy"}, {"where": "good", "table": "scores.parquet"}]
    if isinstance(whole, ImageFiles):
        (tmp_path / "keys.txt").write_text("".join(f"{whole.images[i]}\n" for i in wanted))
        selections.append({"keep": "keys.txt"})
    if make is not parquet_of:
        selections.append({"weights": "weights.npy"})
    for share in (0.0, 0.1, 0.3):
        plain = replace(spec, held_out_share=share).open()  # type: ignore[call-arg]
        left = [images.index(sample.image) for sample in read_all(plain.train)]
        for options in selections:
            files = {name: value if name == "where" else f"{tmp_path}/{value}" for name, value in options.items()}
            data = replace(spec, held_out_share=share, **files).open()  # type: ignore[call-arg]
            found = [images.index(sample.image) for sample in read_all(data.train)]
            assert found == [i for i in left if i in wanted], (share, options)
            assert [whole_index(data.train, i) for i in range(len(found))] == found, "as clipx.score numbers them"
            held = data.held_out and read_all(data.held_out)
            assert held == (plain.held_out and read_all(plain.held_out))
    evaluated = replace(spec, keep=f"{tmp_path}/keep.npy").open_for_evaluation().held_out
    assert evaluated is not None and sum(evaluated.sizes) == TOTAL


def test_listed_numbers_count_the_samples_that_a_run_trains_on(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    spec = WebDatasetSpec(name="mine", shards=shards)
    assert spec.count() is None, "training indexes local shards; a plan reads what is listed"
    for shard in range(SHARDS):
        (tmp_path / f"{shard:05d}_stats.json").write_text(json.dumps({"successes": PER_SHARD}))
    for options in ({}, {"samples_per_shard": PER_SHARD}):
        for share in (0.0, 0.05, 0.2, 0.4):
            chosen = replace(spec, held_out_share=share, **options)  # type: ignore[arg-type]
            assert chosen.count() == sum(chosen.open().train.sizes), (share, options)
    assert replace(spec, keep="x.npy").count() is None
    assert replace(spec, held_out_shards=f"{tmp_path}/00001.tar").count() == TOTAL


# ------------------------------------------------------------------------------------------------ conditions


def test_listed_shards_with_tables_are_not_read_at_the_start(tmp_path: Path) -> None:
    """Sample 13 is listed and has a row, but no caption: its place remains, and the samples after it are right."""
    shards = write_shards(tmp_path, without_caption=(13,))
    write_tables(tmp_path)
    data = opened(shards, where="similarity >= 0.11 and similarity < 0.16", table="shards", samples_per_shard=PER_SHARD)
    assert not list((tmp_path / "cache").rglob("index/*.npy"))
    assert data.train.sizes == [0, 5, 0]
    assert [data.train.read(i).captions for i in (0, 1, 3, 4)] == [[f"caption {i}"] for i in (11, 12, 14, 15)]
    with pytest.raises(BadSample, match="^caption is missing or empty$"):
        data.train.read(2)


def test_a_table_is_matched_by_key_by_uid_or_by_order(tmp_path: Path) -> None:
    shards, table = write_shards(tmp_path), tmp_path / "scores.parquet"
    order = np.random.default_rng(0).permutation(TOTAL).tolist()
    rows = {"score": [float(i) for i in order], "key": [f"{i:09d}" for i in order], "uid": [uid(i) for i in order]}
    for by in ("key", "uid"):
        pq.write_table(pa.table({"score": rows["score"], by: rows[by]}), table)
        assert chosen(shards, where="score > 25", table=str(table)) == [26, 27, 28, 29]
        table.unlink()
    # As pandas writes the index of a table whose rows were sorted or filtered.
    indexed = {"score": [float(i) for i in range(TOTAL)], "index": order}
    pq.write_table(pa.table(indexed), table, row_group_size=7)
    assert chosen(shards, where="score > 25", table=str(table)) == [26, 27, 28, 29]
    parts = [pa.table({"score": [float(i) for i in part]}) for part in (range(12), range(12, TOTAL))]
    for k, part in enumerate(parts):
        pq.write_table(part, tmp_path / f"part{k}.parquet")
    assert chosen(shards, where="score > 25", table=f"{tmp_path}/part*.parquet") == [26, 27, 28, 29]


CASES = {
    "a > 1": [False, True, False],
    "not a > 1": [True, False, False],  # the last value is missing
    "1 < b <= 2": [False, True, False],
    "a / 2 > 0.4": [True, True, False],
    "min(a, b) >= 1": [True, True, False],
    "min(a, b) >= 1 or t == 'cat'": [True, True, False],
    "len(t) > 2 and 'a' in t": [True, False, False],
    "t in ('cat', 'cow')": [True, False, False],
    "t not in ('dog', 'cow')": [True, False, False],
    "b in (-1, 1, 3.5)": [True, False, True],
    "a is None": [False, False, True],
    "a is not None and -b < -1": [False, True, False],
    "abs(b - 2) < 0.5 or flag": [True, True, False],
    "len(none) > 3 or b > 1": [False, True, True],
    "not none == 'x'": [False, False, False],
    "none is None and b > 3": [False, False, True],
}


def test_conditions() -> None:
    texts = pa.array(["cat", "dog", None])
    columns = {"a": [1, 2, None], "b": [1.0, 2.0, 3.5], "flag": [True, False, False], "none": [None] * 3}
    for t in (texts, texts.dictionary_encode(), texts.cast(pa.string_view()), texts.cast(pa.large_string())):
        table = pa.table({**columns, "t": t})
        assert {text: Predicate.parse("data.where", text).selects(table).tolist() for text in CASES} == CASES


FLOATS = (pa.float16(), pa.float32(), pa.float64())
NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), *FLOATS]
VALUES = st.sampled_from(["a", "b", "a", "b", "0", "3", "200", "70000"])
CALCULATIONS = st.recursive(
    VALUES,
    lambda part: st.one_of(
        st.tuples(part, st.sampled_from("+-*"), part).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(st.sampled_from(["min", "max"]), part, part).map(lambda parts: f"{parts[0]}({parts[1]}, {parts[2]})"),
        st.tuples(st.sampled_from(["abs({})", "(-{})"]), part).map(lambda parts: parts[0].format(parts[1])),
    ),
    max_leaves=4,
)
_NUMERIC = ast.BinOp | ast.UnaryOp | ast.Call | ast.Constant


def extremes(kind: pa.DataType) -> list[Fraction]:
    if kind in FLOATS:
        return [Fraction(number) for number in (0.0, 1.0, -2.5, 1024.0)]
    low, high = (-1, 1) if pa.types.is_signed_integer(kind) else (0, 2)
    size = 1 << kind.bit_width - 1
    return [Fraction(number) for number in (low * size, high * size - 1, 0, 1, 7, 100)]


@given(
    kinds=st.tuples(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS)),
    text=st.tuples(CALCULATIONS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), CALCULATIONS).map(" ".join),
)
def test_a_condition_is_exact_or_an_error(kinds: tuple[pa.DataType, pa.DataType], text: str) -> None:
    """Python calculates in fractions. Numbers of up to 53 bits are never an error."""
    condition = f"{text} or a < 0 and b < 0"
    for pair in itertools.product(*map(extremes, kinds)):
        names = dict(zip("ab", pair, strict=True))
        parts = [ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, _NUMERIC)]
        largest = max(abs(eval(part, {}, names)) for part in [*parts, "a", "b"])
        arrays = [
            pa.array([float(value) if kind in FLOATS else int(value)], kind)
            for value, kind in zip(pair, kinds, strict=True)
        ]
        table = pa.table(arrays, names=["a", "b"])
        found: list[bool] | None
        try:
            found = Predicate.parse("data.where", condition).selects(table).tolist()
        except ConfigError:
            found = None
        assert found == [eval(condition, {}, names)] or (found is None and largest > 1 << 53), (condition, pair)


NO_CONDITIONS = (
    "a in ()", f"a > {'9' * 400}", "not " * 2000 + "a > 1", "a" + " + a" * 120 + " > 1",
    "__import__('os').system('true')", "a.b > 1", "a[0] > 1", "(lambda: 1)() > 1", "open(a) > 1", "((((", "f'{a}' == 'x'",
    "[x for x in a]", "a := 3", "len(a, b) > 1", "a ** 9 > 1",
)  # fmt: skip


def test_anything_else_is_an_error_that_names_what_is_allowed() -> None:
    for text in NO_CONDITIONS:
        with pytest.raises(ConfigError, match=r"data.where=.*(write columns, numbers|in more than 100 levels)"):
            WebDatasetSpec(name="mine", where=text)


# ----------------------------------------------------------------------------------------------------- weights


def test_samples_are_drawn_in_proportion_to_their_weights(tmp_path: Path) -> None:
    shards, weights = write_shards(tmp_path), np.zeros(TOTAL)
    weights[[2, 11, 25]] = 1, 2, 5
    np.save(tmp_path / "w.npy", weights)
    order = np.random.default_rng(0).permutation(TOTAL)
    columns = {"key": [f"{i:09d}" for i in order], "weight": weights[order]}
    pq.write_table(pa.table(columns), tmp_path / "w.parquet")
    spec = WebDatasetSpec(name="mine", shards=shards, held_out_share=0, weights=f"{tmp_path}/w.npy")
    train = spec.open().train
    assert captions(train) == ["caption 2", "caption 11", "caption 25"]
    drawn = spec.order(train, 0)
    counts = Counter(drawn(p) for p in range(16_000))
    expected = {0: 2000, 1: 4000, 2: 10_000}
    assert sum((counts[i] - n) ** 2 / n for i, n in expected.items()) < 13.8, "chi-squared, p = 0.001"
    again = spec.order(spec.open().train, 0)
    assert [again(p) for p in (9999, 3, 5000)] == [drawn(p) for p in (9999, 3, 5000)], "a function of the position"
    assert train.fingerprint == opened(shards, weights=f"{tmp_path}/w.parquet").train.fingerprint
    columns = {"index": [25, 2, 11], "weight": [5.0, 1.0, 2.0]}
    pq.write_table(pa.table(columns), tmp_path / "index.parquet")
    assert train.fingerprint == opened(shards, weights=f"{tmp_path}/index.parquet").train.fingerprint
    np.save(tmp_path / "w.npy", weights * [2 if i == 2 else 1 for i in range(TOTAL)])
    assert train.fingerprint != opened(shards, weights=f"{tmp_path}/w.npy").train.fingerprint


def test_weights_that_are_too_large_together_are_an_error(tmp_path: Path) -> None:
    """One sample would be drawn for ever by an infinite sum."""
    shards = write_shards(tmp_path)
    np.save(tmp_path / "w.npy", np.full(TOTAL, 1e307))
    with pytest.raises(ConfigError, match="weights whose sum is not finite: divide them"):
        opened(shards, weights=f"{tmp_path}/w.npy")
    np.save(tmp_path / "w.npy", np.full(TOTAL, 5e306))
    spec = WebDatasetSpec(name="mine", shards=shards, held_out_share=0, weights=f"{tmp_path}/w.npy")
    drawn = spec.order(spec.open().train, 0)
    assert {drawn(p) for p in range(1000)} == set(range(TOTAL))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"index": [2, TOTAL], "weight": [1.0, 1.0]}, "1 of 2 indices are not in the data: give each sample of this"),
        ({"index": [2, 2], "weight": [1.0, 2.0]}, "1 indices are repeated: give each sample of this data one weight"),
        ({"index": [2, 3], "weight": [1.0, -1.0]}, "has the weight -1.0: give finite numbers from 0"),
    ],
)
def test_weights_of_other_data_and_negative_ones_are_errors(tmp_path: Path, columns: Any, message: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "w.parquet")
    with pytest.raises(DataError, match=message):
        opened(write_shards(tmp_path), weights=f"{tmp_path}/w.parquet")


def test_zero_weights_at_the_ends_are_never_drawn() -> None:
    order = WeightedOrder(np.cumsum([0.0, 1e-300, 0.0, 1e-300, 0.0]), 0)
    assert {order(p) for p in range(5000)} == {1, 3}
    assert {order.substitute(p, random.Random(p)) for p in range(100)} == {1, 3}


HALVES = st.sampled_from([0, 1, 5, 2**63, 2**64 - 1])
PAIRS = st.tuples(HALVES, HALVES)  # so that many ids have an equal half


@given(
    parts=st.lists(st.lists(PAIRS, min_size=1, max_size=8), min_size=1, max_size=4), wanted=st.lists(PAIRS, max_size=20)
)
def test_sorted_ids_find_ids_with_equal_halves(
    tmp_path: Path, parts: list[list[tuple[int, int]]], wanted: list[tuple[int, int]]
) -> None:
    """They find what a dict finds, in which the first weight of a repeated id stays."""
    pairs = [pair for part in parts for pair in part]
    expected = {pair: place for place, pair in reversed(list(enumerate(pairs)))}
    places = iter(range(len(pairs)))
    chunks = [np.array([(*pair, next(places)) for pair in part], dtype=WEIGHTED) for part in parts]
    assert write_sorted(tmp_path / "ids", chunks) == len(pairs) - len(expected)
    found = IdSet(np.fromfile(tmp_path / "ids", WEIGHTED))
    assert is_sorted(found.ids) and len(found.ids) == len(expected)
    at = found.find(np.array(wanted, dtype=ID))
    assert [found.ids["weight"][i] if i >= 0 else None for i in at] == [expected.get(pair) for pair in wanted]
    assert found.unknown == len(expected.keys() - set(wanted))


# ---------------------------------------------------------------------------------------------------- clipx.select


ENTRIES, SAMPLES = 12, 600
Matched = list[list[int] | None]


def matched() -> Matched:
    """Entries of samples: entry e is in about 1/(e+1) of them, entry 11 in none; every tenth sample is unusable."""
    rng = random.Random(0)
    lists = [[e for e in range(ENTRIES - 1) if rng.random() < 0.8 / (e + 1) ** 1.5] for _ in range(SAMPLES)]
    return [None if number % 10 == 3 else found for number, found in enumerate(lists)]


def probabilities(lists: Matched, threshold: int) -> list[float]:
    """The definition: an entry is drawn with the probability t / max(count, t), a sample kept if one of its entries is."""
    counts = Counter(entry for entries in lists for entry in entries or ())
    found = []
    for entries in lists:
        skipped = 1.0
        for entry in entries or ():
            skipped *= 1 - threshold / max(counts[entry], threshold)
        found.append(1 - skipped)
    return found


def selected(path: Path, scores: pa.Table, *overrides: str, out: str = "ids.npy") -> Path:
    pq.write_table(scores, path / "scores.parquet", row_group_size=100)
    select(compose(f"scores={path}", f"out={path}/{out}", *overrides, config_name="select"))  # type: ignore[arg-type]
    return path / out


def test_weights_are_the_probabilities_of_samples_with_an_entry(tmp_path: Path) -> None:
    lists = matched()
    columns = {
        "index": [3 * number for number in range(SAMPLES)],
        "key": [f"sample-{number}" for number in range(SAMPLES)],
        "reason": pa.array([None if entries is not None else "damaged" for entries in lists], pa.string()),
        "entries": pa.array(lists, pa.list_(pa.int32())),
    }
    weights = selected(tmp_path, pa.table(columns), "balance=25", "weights=true", out="w.parquet")
    found = pq.read_table(weights).to_pydict()
    expected = {3 * number: p for number, p in enumerate(probabilities(lists, 25)) if p > 0}
    assert dict(zip(found["index"], found["weight"], strict=True)) == pytest.approx(expected, rel=1e-12, abs=0)
    assert [*found] == ["index", "weight"]


TABLE = {
    "index": [0, 2, 4, 6, 8, 10, 12, 14],
    "key": [f"sample-{number}" for number in range(8)],
    "reason": [None, None, "damaged", None, None, None, None, None],
    "similarity": [0.1, 0.5, None, 0.3, 0.3, 0.2, 0.4, 0.0],
    "words": [1, 2, None, 3, 4, 5, 6, 7],
    "script": ["Latin", "Han", None, "Latin", "Latin", "Latin", "Greek", "Latin"],
    "near_duplicate_of": pa.array([None, 0, None, None, 6, 0, None, None], pa.int64()),
    "cluster": [0, 0, None, 0, 0, 1, 1, 1],
}


SELECTED = {
    "": [0, 2, 6, 8, 10, 12, 14],
    "least={similarity:0.3}": [2, 6, 8, 12],
    "most={words:3}": [0, 2, 6],
    "scripts=[Han,Greek]": [2, 12],
    "without=[near]": [0, 6, 12, 14],
    "without=[near] by=similarity": [2, 6, 12, 14],
    "without=[near] scripts=[Latin] least={words:4}": [8, 10, 14],
    "by=similarity top=0.4": [2, 6, 12],
    "by=similarity top=0.3 per_cluster=true": [2, 6, 12],
    "by=similarity top=1": [0, 2, 6, 8, 10, 12, 14],
}


def test_conditions_select_samples(tmp_path: Path) -> None:
    found = {words: np.load(selected(tmp_path, pa.table(TABLE), *words.split())) for words in SELECTED}
    assert {words: ids.tolist() for words, ids in found.items()} == SELECTED
    assert {ids.dtype for ids in found.values()} == {np.dtype(np.int64)}
