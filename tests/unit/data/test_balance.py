"""`clipx.data.select`: its balanced sampling compared with loops that follow the definition (arXiv:2309.16671), and its
conditions."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.runs import compose

from clipx.data.select import select

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


def table(lists: Matched) -> pa.Table:
    numbers = range(len(lists))
    return pa.table(
        {
            "index": [3 * number for number in numbers],
            "key": [f"sample-{number}" for number in numbers],
            "reason": pa.array([None if entries is not None else "damaged" for entries in lists], pa.string()),
            "words": [number % 7 for number in numbers],
            "entries": pa.array(lists, pa.list_(pa.int32())),
        }
    )


def selected(path: Path, scores: pa.Table, *overrides: str, out: str = "ids.npy", rows: int = 100) -> Path:
    pq.write_table(scores, path / "scores.parquet", row_group_size=rows)
    select(compose(f"scores={path}", f"out={path}/{out}", *overrides, config_name="select"))  # type: ignore[arg-type]
    return path / out


def test_weights_are_the_probabilities_of_samples_with_an_entry(tmp_path: Path) -> None:
    lists = matched()
    found = pq.read_table(selected(tmp_path, table(lists), "balance=25", "weights=true", out="w.parquet")).to_pydict()
    expected = {3 * number: p for number, p in enumerate(probabilities(lists, 25)) if p > 0}
    assert dict(zip(found["index"], found["weight"], strict=True)) == pytest.approx(expected, rel=1e-12, abs=0)
    assert [*found] == ["index", "weight"]


# ----------------------------------------------------------------------------------------------------- conditions


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
