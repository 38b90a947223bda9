"""`clipx.data.select` selects the samples that its conditions name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from helpers.runs import compose

from clipx.data.select import select

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


def selected(folder: Path, *overrides: str, out: str = "ids.npy") -> Path:
    pq.write_table(pa.table(TABLE), folder / "scores.parquet")
    select(compose(f"scores={folder}", f"out={folder}/{out}", *overrides, config_name="select"))  # type: ignore[arg-type]
    return folder / out


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
    found = {words: np.load(selected(tmp_path, *words.split())) for words in SELECTED}
    assert {words: ids.tolist() for words, ids in found.items()} == SELECTED
    assert {ids.dtype for ids in found.values()} == {np.dtype(np.int64)}


def test_each_format_has_the_same_samples(tmp_path: Path) -> None:
    words = ("least={words:5}",)
    table = pq.read_table(selected(tmp_path, *words, out="ids.parquet"))
    assert table.to_pydict() == {"key": ["sample-5", "sample-6", "sample-7"], "index": [10, 12, 14]}
    assert selected(tmp_path, *words, out="ids.txt").read_text() == "sample-5\nsample-6\nsample-7\n"
    for file in ("ids.parquet", "ids.npy"):
        selected(tmp_path, *words, out=file)
        found = np.load(selected(tmp_path, f"within={tmp_path}/{file}", "most={words:6}", out="both.npy"))
        assert found.tolist() == [10, 12]
