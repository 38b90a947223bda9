"""Durations, cadences and learning rates against their definitions, step by step in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from clipx.errors import ConfigError
from clipx.schedule import Cadence, ConstantSpec, CosineSpec, Duration, Length, check_cadence

EPOCH, BATCH = 6400, 64  # 100 steps an epoch


# ------------------------------------------------------------------------------------------------- durations


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        ("32ep", 32 * 6400),
        ("0.5ep", 3200),
        ("1.ep", 6400),
        ("10000st", 640_000),
        ("12.8e9sa", 12_800_000_000),
        ("1E+6sa", 1_000_000),
        (" 3 ep ", 3 * 6400),
        ("0sa", 0),
        ("2.5sa", 2),  # to even, as Python rounds
    ],
)
def test_a_duration_is_its_number_times_its_unit(text: str, samples: int) -> None:
    assert Duration.parse(text, "duration").samples(Length(EPOCH, BATCH)) == samples


def test_the_same_length_in_every_unit_is_the_same_number_of_samples() -> None:
    lengths = {
        Duration.parse(text, "d").samples(Length(EPOCH, BATCH)) for text in ("3ep", "300st", "19200sa", "1.92e4sa")
    }
    assert lengths == {19_200}


def test_published_sample_counts_are_exact() -> None:
    assert Duration.parse("32ep", "d").samples(Length(414_080_000, 32_768)) == 32 * 414_080_000
    assert Duration.parse("1e15sa", "d").samples(Length(1, 1)) == 10**15


@pytest.mark.parametrize("text", ["", "32", "ep", "32 epochs", "-1ep", "1e-3ep", "32EP", "3.2.1ep", "infep", "1ep 2st", "0x10st"])  # fmt: skip
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Duration.parse(text, "checkpoint.every")
    message = str(caught.value)
    assert message.startswith(f"checkpoint.every={text} is not a duration: give a number and its unit")
    assert "32ep" in message and "10000st" in message and "12.8e9sa" in message


@pytest.mark.parametrize("text", ["1e16sa", "1e300ep", "1e400st", "9" * 400 + "sa"])
def test_a_duration_too_long_to_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^duration=.* is too long: give at most 1e\+15(sa|ep|st)$"):
        Duration.parse(text, "duration")


# --------------------------------------------------------------------------------------------------- cadences


def happens(cadence: Cadence, batch: int, total: int) -> list[int]:
    return [after for after in range(batch, total + 1, batch) if cadence.due(after - batch, after)]


def test_a_cadence_is_due_once_at_each_multiple_of_its_period() -> None:
    cadence = Cadence.parse("300sa", "c", Length(EPOCH, BATCH))
    assert cadence == Cadence(300, at_end=True)
    # The first step that reaches 300, 600, ...; never twice for one multiple.
    assert happens(cadence, 64, 1280) == [320, 640, 960, 1216]
    assert len(happens(cadence, 64, 64 * 750)) == 64 * 750 // 300


@pytest.mark.parametrize("batch", [1, 7, 64, 100, 300, 301, 1000])
def test_a_cadence_marks_the_same_samples_whatever_the_batch(batch: int) -> None:
    cadence = Cadence(300, at_end=True)
    total = 21_000
    expected = sorted({-(-multiple // batch) * batch for multiple in range(300, total + 1, 300)})
    assert happens(cadence, batch, total) == [after for after in expected if after <= total]


def test_a_period_shorter_than_a_step_is_due_at_every_step() -> None:
    assert happens(Cadence.parse("1sa", "c", Length(EPOCH, BATCH)), 64, 640) == list(range(64, 641, 64))


def test_nothing_is_due_before_the_first_multiple_or_between_two() -> None:
    cadence = Cadence(300, at_end=True)
    assert not cadence.due(0, 299)
    assert cadence.due(299, 300)
    assert not cadence.due(300, 599)
    assert cadence.due(0, 10_000)


@pytest.mark.parametrize(("text", "at_end"), [("none", False), ("end", True)])
def test_none_and_end_are_never_due_during_training(text: str, at_end: bool) -> None:
    cadence = Cadence.parse(text, "c", Length(EPOCH, BATCH))
    assert cadence.at_end is at_end
    assert happens(cadence, 64, 64_000) == []


def test_a_huge_period_is_not_due_within_a_run_but_happens_at_its_end() -> None:
    cadence = Cadence.parse("1e15ep", "c", Length(2_320_000_000, 32_768))
    assert cadence.period == pytest.approx(1e15 * 2_320_000_000)
    assert not cadence.due(0, 10**18)
    assert cadence.at_end


@pytest.mark.parametrize("text", ["0ep", "0st", "0.001sa"])
def test_a_cadence_of_no_samples_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^checkpoint\.every={text} is no time at all: give a duration above zero"):
        Cadence.parse(text, "checkpoint.every", Length(EPOCH, BATCH))


@pytest.mark.parametrize("text", ["never", "", "0ep", "1", "End"])
def test_a_bad_cadence_is_found_before_the_data_is_known(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint\.every"):
        check_cadence(text, "checkpoint.every")


@pytest.mark.parametrize("text", ["none", "end", "1ep", "500st", "1e6sa", "1e15ep"])
def test_a_good_cadence_passes_before_the_data_is_known(text: str) -> None:
    check_cadence(text, "checkpoint.every")


# ---------------------------------------------------------------------------------------------- learning rates


def reference(step: int, warmup: int, total: int, base: float, tail: Callable[[float], float]) -> float:
    """The recipe's definition in steps: base·(step+1)/warmup, then `tail` of the share done."""
    if step < warmup:
        return base * (step + 1) / warmup
    return tail((step - warmup) / (total - warmup))


@pytest.mark.parametrize("min_lr", [0.0, 1e-5])
@pytest.mark.parametrize("warmup", [0, 1, 30, 300])
def test_cosine_equals_its_definition_at_every_step(warmup: int, min_lr: float) -> None:
    steps, base = 300, 5e-4
    rate = CosineSpec(warmup=f"{warmup}st", min_lr=min_lr).build(base, Length(EPOCH, BATCH, steps * BATCH))
    for step in range(steps):
        expected = reference(
            step, warmup, steps, base, lambda done: min_lr + (base - min_lr) * (1 + math.cos(math.pi * done)) / 2
        )
        assert rate(step * BATCH) == pytest.approx(expected, rel=1e-13, abs=1e-19), step


@pytest.mark.parametrize("warmup", [0, 1, 30])
def test_constant_equals_its_definition_at_every_step(warmup: int) -> None:
    rate = ConstantSpec(warmup=f"{warmup}st").build(5e-4, Length(EPOCH, BATCH, 300 * BATCH))
    for step in range(300):
        assert rate(step * BATCH) == pytest.approx(reference(step, warmup, 300, 5e-4, lambda _: 5e-4), rel=1e-13)


def test_cosine_begins_at_the_peak_and_ends_at_the_minimum() -> None:
    rate = CosineSpec(warmup="10st", min_lr=1e-6).build(1e-3, Length(EPOCH, BATCH, 100 * BATCH))
    assert rate(0) == pytest.approx(1e-4)
    assert rate(9 * BATCH) == rate(10 * BATCH) == 1e-3
    assert rate(100 * BATCH) == pytest.approx(1e-6)
    assert rate(1000 * BATCH) == pytest.approx(1e-6)  # not up again


@pytest.mark.parametrize("text", ["2ep", "200st", "12800sa"])
@pytest.mark.parametrize("spec", [CosineSpec, ConstantSpec])
def test_a_warm_up_in_any_unit_gives_the_same_rates(spec: type[CosineSpec] | type[ConstantSpec], text: str) -> None:
    total = 10 * EPOCH
    rate = spec(warmup=text).build(5e-4, Length(EPOCH, BATCH, total))
    expected = spec(warmup="200st").build(5e-4, Length(EPOCH, BATCH, total))
    assert [rate(seen) for seen in range(0, total, BATCH)] == [expected(seen) for seen in range(0, total, BATCH)]


@pytest.mark.parametrize("batch", [1, 32, 64, 128, 640])
def test_another_batch_moves_nothing_in_samples(batch: int) -> None:
    """After the warm-up the rate is a function of the samples seen; within it, of the samples at the step's end."""
    total = 10 * EPOCH
    rate = CosineSpec(warmup="2ep").build(5e-4, Length(EPOCH, batch, total))
    base = CosineSpec(warmup="2ep").build(5e-4, Length(EPOCH, 640, total))
    for seen in range(2 * EPOCH, total, 640):
        assert rate(seen) == base(seen)
    for end in range(640, 2 * EPOCH + 1, 640):
        assert rate(end - batch) == pytest.approx(5e-4 * end / (2 * EPOCH), rel=1e-13)
        assert base(end - 640) == pytest.approx(5e-4 * end / (2 * EPOCH), rel=1e-13)


@pytest.mark.parametrize("batch", [7, 64, 1000])
def test_a_warm_up_that_ends_inside_a_step_never_passes_the_peak(batch: int) -> None:
    rate = CosineSpec(warmup="1111sa").build(5e-4, Length(EPOCH, batch, 20_000))
    rates = [rate(seen) for seen in range(0, 20_000, batch)]
    assert max(rates) <= 5e-4
    assert min(rates) >= 0
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_a_negative_minimum_and_one_above_the_peak_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^schedule\.min_lr=-1e-05 is negative: give 0"):
        CosineSpec(warmup="1st", min_lr=-1e-5)
    with pytest.raises(
        ConfigError, match=r"^schedule\.min_lr=0\.01 is above optimizer\.lr=0\.001: give at most 0\.001"
    ):
        CosineSpec(warmup="1st", min_lr=1e-2).check(1e-3)
    CosineSpec(warmup="1st", min_lr=1e-3).check(1e-3)
    ConstantSpec(warmup="1st").check(1e-3)
