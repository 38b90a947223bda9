"""Mixtures: shares of the sources, passes over each source, configuration, resuming."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from helpers.loading import train_batches
from helpers.runs import compose, rows
from helpers.samples import Numbers, img2dataset, write_tar
from hypothesis import given
from hypothesis import strategies as st

from clipx.config.saved import from_dict, to_dict
from clipx.data.images import PixelReader
from clipx.data.mixture import Mixture
from clipx.data.order import MixedOrder, Order
from clipx.errors import CheckpointError
from clipx.model.tokenizer import Tokenizer
from clipx.trainer.spec import RunSpec
from clipx.trainer.trainer import Trainer

SIZES = ([7, 0, 5], [30], [1], [4, 4, 9])
NAMES = ("a", "b", "c", "d")
WEIGHTS = ("2", "0.3", "1e-2", "5.5")


def mixed_order(weights: Sequence[str] = WEIGHTS, seed: int = 3, sizes: Sequence[Sequence[int]] = SIZES) -> MixedOrder:
    orders = [Order(shards, seed, 6, stream=(k,)) for k, shards in enumerate(sizes, 1)]
    return MixedOrder(NAMES[: len(sizes)], orders, [Fraction(w) for w in weights], random.Random(f"{seed}/mixture/()"))


def source_of(order: MixedOrder, index: int) -> tuple[int, int]:
    for k, size in enumerate(order.sizes):
        if index < size:
            return k, index
        index -= size
    raise AssertionError("no source has it")


def places_by_source(order: MixedOrder, positions: int) -> list[list[int]]:
    """Returns the samples of each source in the order in which they are drawn."""
    own: list[list[int]] = [[] for _ in order.sizes]
    for position in range(positions):
        k, index = source_of(order, order(position))
        own[k].append(index)
    return own


@given(st.lists(st.integers(1, 10**6), min_size=4, max_size=4))
def test_every_prefix_of_the_stream_has_the_share_of_each_source(thousandths: list[int]) -> None:
    order = mixed_order([str(Fraction(weight, 1000)) for weight in thousandths])
    counts = Counter[int]()
    for position in range(400):
        for k, weight in enumerate(thousandths):  # the bound is log2 of the 4 sources
            assert abs(counts[k] - position * Fraction(weight, sum(thousandths))) < 2
        assert [drawn.samples for drawn in order.source_counts(position).values()] == [counts[k] for k in range(4)]
        counts[source_of(order, order(position))[0]] += 1


def test_each_source_follows_its_order_with_every_sample_once_per_pass() -> None:
    own = places_by_source(mixed_order(), 10_000)
    for k, shards in enumerate(SIZES):
        alone = Order(shards, 3, 6, stream=(k + 1,))
        assert own[k] == [alone(place) for place in range(len(own[k]))]
        for start in range(0, len(own[k]) - alone.samples, alone.samples):
            assert sorted(own[k][start : start + alone.samples]) == list(range(alone.samples))


def test_the_order_of_a_seed_is_frozen() -> None:
    # Resuming and comparing runs rely on this.
    order = mixed_order(("2", "1"), sizes=([3, 2], [4]))
    assert [order(position) for position in range(18)] == [8, 4, 0, 7, 2, 1, 6, 3, 4, 5, 2, 0, 8, 1, 3, 6, 2, 3]


def test_a_bad_sample_is_replaced_from_the_same_source() -> None:
    broken = Numbers([40], broken=frozenset(range(20)))
    mixture = Mixture.of({"a": broken, "b": Numbers([60])})
    order = MixedOrder(
        mixture.names, [Order([40], 0, 40, stream=(1,)), Order([60], 0, 60, stream=(2,))],
        [Fraction(1), Fraction(3)], random.Random(0),
    )  # fmt: skip
    images = PixelReader((8,), [0.5, 1.0], 10**6)
    batches = list(train_batches(mixture, order, images, Tokenizer(8), range(240), 12))
    for batch in batches:
        assert abs((batch.index < 40).sum().item() - 3) <= 1
        assert not (batch.index < 20).any()
    assert sum(len(batch.bad) for batch in batches) >= 20


ADD = "+data@data.sources."
TWO = ("data=mixture", f"{ADD}big=shapes", f"{ADD}small=digits")


def test_a_mixture_survives_saving_and_loading() -> None:
    spec = compose(*TWO, "data.sources.big.samples=77", "data.sources.small.weight=0.5", f"{ADD}inner=mixture",
                   "+data@data.sources.inner.sources.x=csv", "data.sources.inner.sources.x.path=t.csv")  # fmt: skip
    again = from_dict(RunSpec, yaml.safe_load(yaml.safe_dump(to_dict(spec))))
    assert again == spec
    assert type(again.data.sources["inner"].sources["x"]) is type(spec.data.sources["inner"].sources["x"])  # type: ignore[attr-defined]
    assert set(spec.evaluator) == {"retrieval"}, "the mixture chooses the evaluators, not its sources"


def test_samples_are_counted_by_source_and_other_weights_do_not_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = write_tar(tmp_path / "a.tar", img2dataset(range(9)))
    words = (
        "data=mixture", f"{ADD}big=shapes", f"{ADD}small=webdataset", f"data.sources.small.shards={shard}",
        "data.sources.big.samples=100", "data.batch_size=32", "data.workers=0", "logger=[]", "evaluator=[]",
        "schedule.warmup=2st", "log_every=1st", "report=false", "duration=6st", f"run_dir={tmp_path}/run",
    )  # fmt: skip
    Trainer(compose(*words, "data.sources.big.weight=3")).fit()
    assert "sources  big 144 samples = 1.44 passes; small 48 samples = 5.333 passes" in capsys.readouterr().out
    logged = [row for row in rows(tmp_path / "run") if "train/loss" in row]
    assert len(logged) == 6
    for row in logged:
        counts = [row[f"train/samples/{name}"] for name in ("big", "small")]
        assert sum(counts) == row["samples"]
        assert abs(counts[0] - row["samples"] * 3 / 4) < 1
    with pytest.raises(CheckpointError, match=r"another run \(data\.sources\.big\.weight: 3\.0 -> 4\.0\)"):
        Trainer(compose(*words, "resume=auto", "data.sources.big.weight=4"))
    Trainer(compose(*words, "resume=auto", "data.sources.big.weight=3", "data.sources.small.cache_gb=7")).close()


def test_indices_are_unique_over_all_sources_and_map_to_their_samples() -> None:
    mixture = Mixture.of({"a": Numbers([3, 0, 2], fingerprint="x"), "b": Numbers([4], broken=frozenset({1}))})
    assert mixture.sizes == [3, 0, 2, 4]
    assert [mixture.read(i).label for i in (0, 4, 5, 8)] == [0, 4, 0, 3]
    assert [mixture.key(i) for i in (4, 5, 6)] == ["sample 4", "sample 0", "sample 1"]
    other = Mixture.of({"a": Numbers([3, 0, 2], fingerprint="y"), "b": Numbers([4])})
    assert mixture.fingerprint != other.fingerprint
