"""Mixtures: shares of the sources, passes over each source, configuration, resuming, and one stream for all ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from helpers.runs import compose, rows
from helpers.samples import Numbers, encode, img2dataset, picture, write_tar
from hypothesis import given
from hypothesis import strategies as st

from clipx.config.registry import CONF_DIR
from clipx.config.saved import from_dict, to_dict
from clipx.data.loader import train_loader
from clipx.data.mixture import MixedOrder, Mixture, _common_classes
from clipx.data.order import Order
from clipx.data.spec import Classes
from clipx.data.views import ImageView
from clipx.errors import CheckpointError, ConfigError
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


# --------------------------------------------------------------------------------------------------------- order


@given(st.lists(st.integers(1, 10**6), min_size=4, max_size=4))
def test_every_prefix_of_the_stream_has_the_share_of_each_source(thousandths: list[int]) -> None:
    order = mixed_order([str(Fraction(weight, 1000)) for weight in thousandths])
    counts = Counter[int]()
    for position in range(400):
        for k, weight in enumerate(thousandths):  # the bound is log2 of the 4 sources
            assert abs(counts[k] - position * Fraction(weight, sum(thousandths))) < 2
        assert [drawn.samples for drawn in order.source_counts(position).values()] == [counts[k] for k in range(4)]
        counts[source_of(order, order(position))[0]] += 1


def test_shares_are_exact_over_many_samples() -> None:
    order = mixed_order(("0.1", "0.2", "0.3", "0.4"))
    assert {n: d.samples for n, d in order.source_counts(10**15).items()} == {
        "a": 10**14, "b": 2 * 10**14, "c": 3 * 10**14, "d": 4 * 10**14,
    }  # fmt: skip


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


def test_sources_of_equal_size_are_shuffled_differently() -> None:
    own = places_by_source(mixed_order(("1", "1"), sizes=([50], [50])), 100)
    assert sum(a == b for a, b in zip(*own, strict=True)) < 25  # 1 position in a window of 6 agrees by chance


# -------------------------------------------------------------------------------------------------------- source


def test_indices_are_unique_over_all_sources_and_map_to_their_samples() -> None:
    mixture = Mixture.of({"a": Numbers([3, 0, 2], fingerprint="x"), "b": Numbers([4], broken=frozenset({1}))})
    assert mixture.sizes == [3, 0, 2, 4]
    assert [mixture.read(i).label for i in (0, 4, 5, 8)] == [0, 4, 0, 3]
    assert [mixture.key(i) for i in (4, 5, 6)] == ["sample 4", "sample 0", "sample 1"]
    other = Mixture.of({"a": Numbers([3, 0, 2], fingerprint="y"), "b": Numbers([4])})
    assert mixture.fingerprint != other.fingerprint


def test_a_bad_sample_is_replaced_from_the_same_source() -> None:
    broken = Numbers([40], broken=frozenset(range(20)))
    mixture = Mixture.of({"a": broken, "b": Numbers([60])})
    order = MixedOrder(
        mixture.names, [Order([40], 0, 40, stream=(1,)), Order([60], 0, 60, stream=(2,))],
        [Fraction(1), Fraction(3)], random.Random(0),
    )  # fmt: skip
    loader = train_loader(
        mixture, order, ImageView(8, [0.5, 1.0], 10**6), Tokenizer(8),
        seed=0, samples=range(240), batch=12, rank=0, world=1, workers=0, prefetch=2, pin=False,
    )  # fmt: skip
    batches = list(loader)
    for batch in batches:
        assert abs((batch.index < 40).sum().item() - 3) <= 1
        assert not (batch.index < 20).any()
    assert sum(len(batch.bad) for batch in batches) >= 20


def test_classes_are_defined_only_if_all_held_out_sources_agree() -> None:
    one, two = Classes(["cat"], ["{}"]), Classes(["dog"], ["{}"])
    assert _common_classes([one, one]) == one
    assert _common_classes([one, two]) is None
    assert _common_classes([one, None]) is None
    assert _common_classes([]) is None


# ------------------------------------------------------------------------------------------------- configuration

ADD = "+data@data.sources."
TWO = ("data=mixture", f"{ADD}big=shapes", f"{ADD}small=digits")


def test_a_mixture_survives_saving_and_loading() -> None:
    spec = compose(*TWO, "data.sources.big.samples=77", "data.sources.small.weight=0.5", f"{ADD}inner=mixture",
                   "+data@data.sources.inner.sources.x=csv", "data.sources.inner.sources.x.path=t.csv")  # fmt: skip
    again = from_dict(RunSpec, yaml.safe_load(yaml.safe_dump(to_dict(spec))))
    assert again == spec
    assert type(again.data.sources["inner"].sources["x"]) is type(spec.data.sources["inner"].sources["x"])  # type: ignore[attr-defined]
    assert set(spec.evaluator) == {"retrieval"}, "the mixture chooses the evaluators, not its sources"


def test_a_mixture_can_be_a_user_defined_option(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "web.yaml").write_text(
        "defaults: [mixture, /data@sources.cc: cc3m, /data@sources.own: csv, _self_]\n"
        "name: web\nsources: {cc: {weight: 3, shards: a.tar}, own: {path: t.csv}}\n"
    )
    spec = compose("data=web", "data.sources.own.weight=2", config_dir=tmp_path)
    weights = {name: source.weight for name, source in spec.data.sources.items()}  # type: ignore[attr-defined]
    assert weights == {"cc": 3.0, "own": 2.0}


def test_every_option_can_be_a_source() -> None:
    names = sorted(path.stem for path in (CONF_DIR / "data").glob("*.yaml"))
    spec = compose("data=mixture", *(f"{ADD}{name}={name}" for name in names))
    assert list(spec.data.sources) == names  # type: ignore[attr-defined]
    assert spec.data.batch_size == 256, "the batch size of the mixture, not of a source's recipe"
    assert from_dict(RunSpec, to_dict(spec)) == spec


def test_errors_in_a_saved_mixture_name_the_keys_of_the_source() -> None:
    saved = to_dict(compose(*TWO))
    saved["data"]["sources"]["big"]["shuffle_window"] = 0
    with pytest.raises(ConfigError, match=r"^data\.sources\.big\.shuffle_window=0 must be at least 1 sample$"):
        from_dict(RunSpec, saved)


def test_each_source_uses_its_replacement_and_window() -> None:
    spec = compose(*TWO, "data.sources.big.replacement=true", "data.sources.small.shuffle_window=1")
    order = spec.data.order(Mixture.of({"big": Numbers([100]), "small": Numbers([100])}), 0)
    drawn = [order(position) for position in range(200)]
    assert len({index for index in drawn if index < 100}) < 80
    assert [index for index in drawn if index >= 100] == list(range(100, 200)), "a window of 1 in a single shard"


# ------------------------------------------------------------------------------------------------------- held out


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 40 images, one of them damaged."""
    folder = tmp_path_factory.mktemp("table")
    for i in range(40):
        (folder / f"{i}.png").write_bytes(encode(picture(20, 16, i), "PNG") if i != 5 else b"broken")
    rows = "".join(f"{i}.png,picture number {i}\n" for i in range(40))
    (folder / "t.csv").write_text(f"filepath,caption\n{rows}")
    return folder / "t.csv"


def small(table: Path, *overrides: str) -> RunSpec:
    """Returns a mixture of 100 drawn scenes and 36 pictures with weights 3 : 1."""
    return compose(
        "data=mixture", f"{ADD}scenes=shapes", "data.sources.scenes.samples=100",
        "data.sources.scenes.held_out_samples=24", "data.sources.scenes.weight=3",
        f"{ADD}pictures=csv", f"data.sources.pictures.path={table}", "data.sources.pictures.held_out_share=0.1",
        "data.batch_size=32", "data.workers=0", "logger=[]", "evaluator=[]", "schedule.warmup=2st", "log_every=1st",
        "report=false", "duration=6st", *overrides,
    )  # fmt: skip


def test_held_out_samples_are_those_of_all_sources_or_of_the_named_source(table: Path) -> None:
    both = small(table).data.open()
    assert sum(both.train.sizes) == 136
    assert both.held_out is not None and sum(both.held_out.sizes) == 28
    assert both.classes is None
    scenes = small(table, "data.held_out=scenes").data.open()
    assert scenes.held_out is not None and sum(scenes.held_out.sizes) == 24
    assert scenes.classes is not None, "zero-shot is possible on a source that has classes"
    with pytest.raises(ConfigError, match=r"^data\.held_out=pictures has no held-out samples: raise .*held_out_share"):
        small(table, "data.sources.pictures.held_out_share=0", "data.held_out=pictures").data.open()


# ----------------------------------------------------------------------------------------------------------- runs


def test_samples_are_counted_by_source_and_other_weights_do_not_resume(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = write_tar(tmp_path / "a.tar", img2dataset(range(9)))
    words = (f"{ADD}remote=webdataset", f"data.sources.remote.shards={shard}", "data.sources.remote.weight=2",
             f"run_dir={tmp_path}/run")  # fmt: skip
    Trainer(small(table, *words)).fit()
    assert "sources  pictures 32 samples = 0.8889 passes; remote 64 samples = 7.111 passes; scenes 96 samples = 0.96 passes" in capsys.readouterr().out  # fmt: skip
    logged = [row for row in rows(tmp_path / "run") if "train/loss" in row]
    assert len(logged) == 6
    for row in logged:
        counts = [row[f"train/samples/{name}"] for name in ("scenes", "pictures", "remote")]
        assert sum(counts) == row["samples"]
        assert abs(counts[0] - row["samples"] / 2) < 1
    with pytest.raises(CheckpointError, match=r"another run \(data\.sources\.scenes\.weight: 3\.0 -> 4\.0\)"):
        Trainer(small(table, *words, "resume=auto", "data.sources.scenes.weight=4"))
    Trainer(small(table, *words, "resume=auto", "data.sources.remote.cache_gb=7")).close()
