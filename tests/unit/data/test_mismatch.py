"""Mismatched captions: exactly the given share of training samples has the captions of another sample."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.runs import compose, small
from helpers.samples import Numbers

from clipx.data.mismatch import Mismatched, Permutation
from clipx.data.source import BadSample
from clipx.errors import CheckpointError
from clipx.trainer.trainer import Trainer


def exchanged(n: int, share: float, seed: int = 0) -> dict[int, int]:
    """Returns {sample: sample whose captions it has} of the samples with other captions."""
    source = Mismatched.of(Numbers([n]), share, seed)
    samples = [source.read(i) for i in range(n)]
    assert [sample.label for sample in samples] == list(range(n)), "image and label stay"
    partners = [int(sample.captions[0]) for sample in samples]
    assert [sample.captions for sample in samples] == [[f"{k}", f"number {k}"] for k in partners]
    return {i: k for i, k in enumerate(partners) if i != k}


def test_the_share_is_exact_and_no_caption_is_lost() -> None:
    for (n, share), count in {(50, 0.2): 10, (50, 1): 50, (7, 0.5): 4, (33, 0.1): 3, (9, 0): 0, (9, 0.1): 0}.items():
        found = exchanged(n, share)  # a single sample has no partner
        assert len(found) == count and sorted(found) == sorted(found.values()), (n, share)


def test_the_exchange_is_a_function_of_the_seed_and_a_smaller_share_exchanges_a_subset() -> None:
    first, again, other, more = (
        exchanged(200, share, seed) for share, seed in ((0.2, 1), (0.2, 1), (0.2, 2), (0.4, 1))
    )
    assert first == again
    assert len(first.keys() & other.keys()) < 25, "independent sets of 40 of 200 share 8 on average"
    assert first.keys() < more.keys()


def test_the_permutation_covers_its_range_and_has_an_inverse() -> None:
    for size in (1, 2, 3, 5, 16, 17, 1000):
        order = Permutation(size, "key")
        values = [order(i) for i in range(size)]
        assert sorted(values) == list(range(size))
        assert [order.inverse(value) for value in values] == list(range(size)), size
    order = Permutation(5_000_000_000, "key")  # takes no memory
    assert all(order.inverse(order(i)) == i for i in (0, 1, 4_999_999_999))


def test_an_unreadable_partner_is_a_bad_sample() -> None:
    whole = Mismatched.of(Numbers([10]), 1.0, 0)
    source = Mismatched.of(Numbers([10], broken=frozenset({whole.partner(7)})), 1.0, 0)
    with pytest.raises(BadSample, match="broken on purpose"):
        source.read(7)


def test_a_run_reads_the_captions_of_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(small(tmp_path / "run", "data.mismatched=0.25", "seed=3", "duration=1st", "schedule.warmup=1st"))
    plain = trainer.spec.data.open()
    wanted = Mismatched.of(plain.train, 0.25, 3)
    n = sum(plain.train.sizes)
    assert [trainer.dataset.train.read(i) for i in range(n)] == [wanted.read(i) for i in range(n)]
    assert trainer.dataset.train.fingerprint == plain.train.fingerprint
    assert plain.held_out is not None and trainer.dataset.held_out is not None
    assert trainer.dataset.held_out.read(0) == plain.held_out.read(0)
    trainer.fit()
    assert f"{round(n / 4)} with the captions of another" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="data.mismatched: 0.25 -> 0.5"):
        Trainer(small(tmp_path / "run", "data.mismatched=0.5", "seed=3", "duration=2st", "resume=latest"))


def test_a_mixture_exchanges_captions_over_all_sources(tmp_path: Path) -> None:
    add = "+data@data.sources."
    sizes = [f"data.sources.{name}.{size}" for name in "ab" for size in ("samples=64", "held_out_samples=16")]
    spec = compose("data=mixture", f"{add}a=shapes", f"{add}b=shapes", *sizes, "data.batch_size=32", "data.workers=0",
                   "data.mismatched=1.0", "duration=1st", "schedule.warmup=1st", "evaluator=[]", "logger=[]",
                   f"run_dir={tmp_path / 'run'}", "report=false")  # fmt: skip
    trainer = Trainer(spec)
    source = trainer.dataset.train
    assert isinstance(source, Mismatched)
    sides = [(i < 64, source.partner(i) < 64) for i in range(128)]
    assert {(True, False), (False, True)} < set(sides), "captions move between the sources"
    trainer.close()
