"""Balanced sampling of `clipx.data.select`, compared with loops that follow the definition (arXiv:2309.16671)."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.runs import compose

from clipx.data.balance import entry_counts, keep_probabilities, uniform_draws
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


def draw(seed: int, index: int) -> float:
    """SplitMix64 in integers: the number at the place `index` of the sequence that begins with the state of the seed."""
    state = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return ((z ^ (z >> 31)) >> 11) / 2**53


def table(lists: Matched, first: int = 0) -> pa.Table:
    numbers = range(len(lists))
    return pa.table(
        {
            "index": [first + 3 * number for number in numbers],
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


@pytest.mark.parametrize("seed", [0, 5])
def test_samples_are_selected_by_the_definition_and_given_draws(tmp_path: Path, seed: int) -> None:
    """The counts are those of the samples that meet the other conditions."""
    lists = [entries if number % 7 >= 2 else None for number, entries in enumerate(matched())]
    probability = probabilities(lists, 25)
    expected = [3 * number for number in range(SAMPLES) if draw(seed, 3 * number) < probability[number]]
    options = ("balance=25", *([f"seed={seed}"] if seed else []), "least={words:2}")
    assert np.load(selected(tmp_path, table(matched()), *options)).tolist() == expected
    assert 50 < len(expected) < sum(map(bool, lists)) - 50


def test_a_sample_is_selected_in_any_order_and_any_parts_of_the_table(tmp_path: Path) -> None:
    scores = table(matched())
    expected = np.load(selected(tmp_path, scores, "balance=25")).tolist()
    shuffled = scores.take(np.random.default_rng(0).permutation(SAMPLES))
    assert np.load(selected(tmp_path, shuffled, "balance=25", rows=7)).tolist() == expected
    assert np.load(selected(tmp_path, scores, "balance=25", "seed=1")).tolist() != expected


def test_an_entry_keeps_its_threshold_in_expectation() -> None:
    """All of its samples if it has fewer; more than the threshold by those samples that match rarer entries, too."""
    lists = [*matched(), *([0] for _ in range(100))]
    column = pa.array(lists, pa.list_(pa.int32()))
    counts = entry_counts([column])
    assert counts.tolist() == [sum(e in (found or ()) for found in lists) for e in range(ENTRIES - 1)]
    threshold = 40
    probability = keep_probabilities(column, counts, threshold)
    assert probability.tolist() == pytest.approx(probabilities(lists, threshold), rel=1e-12, abs=0)
    index, seeds = np.arange(len(lists)), 300
    kept = np.array([uniform_draws(index, seed) < probability for seed in range(seeds)])
    for entry, count in enumerate(counts.tolist()):
        rows = np.array([entry in (found or ()) for found in lists])
        expected, deviation = probability[rows].sum(), np.sqrt((probability * (1 - probability))[rows].sum() / seeds)
        assert abs(kept[:, rows].sum(1).mean() - expected) <= 5 * deviation
        assert expected >= min(count, threshold) - 1e-9
    alone = kept[:, -100:].mean()  # samples of the most frequent entry alone
    share = threshold / counts[0]
    assert abs(alone - share) < 5 * np.sqrt(share * (1 - share) / (100 * seeds))


def test_draws_are_uniform_and_independent_of_neighbours_and_seeds() -> None:
    draws = [uniform_draws(np.arange(100_000), seed) for seed in (0, 1)]
    for found in draws:
        assert np.abs(np.histogram(found, 50, (0, 1))[0] - 2000).max() < 5 * np.sqrt(2000)
        assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 5 / np.sqrt(100_000)
    assert abs(np.corrcoef(*draws)[0, 1]) < 5 / np.sqrt(100_000)


def test_weights_are_the_probabilities_of_samples_with_an_entry(tmp_path: Path) -> None:
    lists = matched()
    found = pq.read_table(selected(tmp_path, table(lists), "balance=25", "weights=true", out="w.parquet")).to_pydict()
    expected = {3 * number: p for number, p in enumerate(probabilities(lists, 25)) if p > 0}
    assert dict(zip(found["index"], found["weight"], strict=True)) == pytest.approx(expected, rel=1e-12, abs=0)
    assert [*found] == ["index", "weight"]
