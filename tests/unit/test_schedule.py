"""Durations, cadences and learning rates compared with their definitions, step by step in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.runs import compose, small
from hypothesis import given
from hypothesis import strategies as st
from open_clip_train import scheduler as open_clip  # type: ignore[import-untyped]

from clipx.config.duration import Cadence, Duration, Length, check_cadence
from clipx.errors import ConfigError
from clipx.schedule import ConstantCooldownSpec, ConstantScheduleSpec, CosineSpec, ScheduleSpec
from clipx.trainer.summary import facts
from clipx.trainer.trainer import Trainer

EPOCH, BATCH = 6400, 64  # 100 steps per epoch


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        ("0.5ep", 3200), ("1.ep", 6400), ("10000st", 640_000), ("12.8e9sa", 12_800_000_000), ("1E+6sa", 1_000_000),
        (" 3 ep ", 3 * 6400), ("300st", 3 * 6400), ("1.92e4sa", 3 * 6400), ("0sa", 0),
        ("2.5sa", 2),  # rounds half to even, like Python
        ("20%", 20_000), ("0%", 0), ("100%", 100_000), ("33.3%", 33_300), (" 5 %", 5000), ("1e1%", 10_000),
    ],
)  # fmt: skip
def test_a_duration_is_a_number_times_a_unit_or_a_share_of_the_run(text: str, samples: int) -> None:
    assert Duration.parse(text, "d", share="%" in text).samples(Length(EPOCH, BATCH, 100_000)) == samples


def test_published_sample_counts_are_exact() -> None:
    assert Duration.parse("32ep", "d").samples(Length(414_080_000, 32_768)) == 32 * 414_080_000
    assert Duration.parse("1e15sa", "d").samples(Length(1, 1)) == 10**15


@pytest.mark.parametrize("text", ["", "32", "ep", "-1ep", "1e-3ep", "32EP", "3.2.1ep", "infep", "1ep 2st", "0x10st"])
def test_an_invalid_duration_is_rejected_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match=r" is not a duration: give a number and its unit, e.g. 32ep .*10000st.*sa"):
        Duration.parse(text, "checkpoint.every")


@pytest.mark.parametrize("text", ["1e16sa", "1e300ep", "9" * 400 + "sa"])
def test_a_duration_too_long_to_count_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^duration=.* is too long: give at most 1e\+15(sa|ep|st)$"):
        Duration.parse(text, "duration")


def due_samples(cadence: Cadence, batch: int, total: int) -> list[int]:
    return [after for after in range(batch, total + 1, batch) if cadence.due(after - batch, after)]


@given(period=st.integers(1, 2000), batch=st.integers(1, 2000), steps=st.integers(1, 50))
def test_a_cadence_is_due_at_the_first_step_that_reaches_each_multiple(period: int, batch: int, steps: int) -> None:
    cadence, total = Cadence.parse(f"{period}sa", "c", Length(EPOCH, BATCH)), steps * batch
    assert cadence == Cadence(period, at_end=True)
    assert due_samples(cadence, batch, total) == sorted(
        {-(-multiple // batch) * batch for multiple in range(period, total + 1, period)}
    )


@pytest.mark.parametrize(("text", "at_end"), [("none", False), ("end", True), ("1e15ep", True)])
def test_none_end_and_a_huge_period_are_never_due_during_training(text: str, at_end: bool) -> None:
    check_cadence(text, "checkpoint.every")
    cadence = Cadence.parse(text, "c", Length(EPOCH, BATCH))
    assert cadence.at_end is at_end
    assert due_samples(cadence, 64, 64_000) == []


def test_an_invalid_cadence_is_rejected_with_and_without_the_data() -> None:
    for text in ("never", "", "1", "End", "0ep"):
        with pytest.raises(ConfigError, match=r"^checkpoint\.every"):
            check_cadence(text, "checkpoint.every")
    for text in ("0st", "0.001sa"):
        with pytest.raises(ConfigError, match=rf"^checkpoint\.every={text} is less than one sample: give a longer"):
            Cadence.parse(text, "checkpoint.every", Length(EPOCH, BATCH))


@given(data=st.data(), steps=st.integers(1, 300), min_lr=st.floats(0, 5e-4), power=st.floats(0.1, 4))
def test_schedules_match_open_clip_at_every_step(data: st.DataObject, steps: int, min_lr: float, power: float) -> None:
    base, length = 5e-4, Length(EPOCH, BATCH, steps * BATCH)
    warmup = data.draw(st.integers(0, steps), "warmup")
    cooldown = data.draw(st.integers(0, steps - warmup), "cooldown")
    parts, none = {"warmup": f"{warmup}st"}, _NoGroups()
    cosine = open_clip.cosine_lr(none, base - min_lr, warmup, steps)  # which ends at 0
    for spec, theirs in (
        (CosineSpec(**parts, min_lr=min_lr), lambda step: min_lr + cosine(step) if step >= warmup else constant(step)),
        (ConstantScheduleSpec(**parts), constant := open_clip.const_lr(none, base, warmup, steps)),
        (
            ConstantCooldownSpec(**parts, cooldown=f"{cooldown}st", power=power, min_lr=min_lr),
            open_clip.const_lr_cooldown(none, base, warmup, steps, cooldown, power, min_lr),
        ),
    ):
        rate = spec.build(base, length)
        for step in range(steps):
            assert rate(step * BATCH) == pytest.approx(theirs(step), rel=1e-9, abs=1e-19), (spec, step)


class _NoGroups:
    param_groups = ()


@given(
    batch=st.integers(1, 2000), steps=st.integers(1, 200), shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    min_lr=st.floats(0, 5e-4), power=st.floats(0.1, 4),
)  # fmt: skip
def test_rates_rise_to_the_peak_and_never_again_whatever_the_batch(
    batch: int, steps: int, shares: tuple[float, float], min_lr: float, power: float
) -> None:
    """The parts may begin and end inside a step. After the warm-up a rate depends on the samples alone."""
    base, total = 5e-4, steps * batch
    parts = {"warmup": f"{int(shares[0] * total)}sa"}
    cooldown = f"{int(shares[1] * (1 - shares[0]) * total)}sa"
    for spec in (CosineSpec(**parts, min_lr=min_lr), ConstantCooldownSpec(**parts, cooldown=cooldown, power=power)):
        rate, single = (spec.build(base, Length(EPOCH, size, total)) for size in (batch, 1))
        rates = [rate(seen) for seen in range(0, total, batch)]
        peak = rates.index(max(rates))
        assert rates[: peak + 1] == sorted(rates[: peak + 1])
        assert rates[peak:] == sorted(rates[peak:], reverse=True)
        assert min(rates) >= 0 and max(rates) <= base
        for step, found in enumerate(rates):
            seen = step * batch
            if seen >= int(shares[0] * total):
                assert found == single(seen)
            else:
                assert found == pytest.approx(base * min(1, (seen + batch) / int(shares[0] * total)), rel=1e-13)


def test_rates_at_the_edges_and_beyond_the_run() -> None:
    length = Length(EPOCH, BATCH, 100 * BATCH)
    rate = CosineSpec(warmup="10st", min_lr=1e-6).build(1e-3, length)
    assert rate(0) == pytest.approx(1e-4)
    assert rate(9 * BATCH) == rate(10 * BATCH) == 1e-3
    assert rate(100 * BATCH) == pytest.approx(1e-6)
    assert rate(1000 * BATCH) == pytest.approx(1e-6)  # does not rise again
    rate = ConstantCooldownSpec(warmup="10st", cooldown="20%", min_lr=1e-5).build(1e-3, length)
    # until the first step of the cool-down
    assert rate(9 * BATCH) == rate(10 * BATCH) == rate(79 * BATCH) == rate(80 * BATCH) == 1e-3
    assert rate(99 * BATCH) == pytest.approx(1e-5 + 0.99e-3 / 20)  # the last step
    assert rate(100 * BATCH) == rate(1000 * BATCH) == pytest.approx(1e-5)


@pytest.mark.parametrize("text", ["5%", "0.5ep", "3200sa"])
@pytest.mark.parametrize("spec", [CosineSpec, ConstantScheduleSpec, ConstantCooldownSpec])
def test_a_warm_up_in_any_unit_and_as_a_share_gives_the_same_rates(
    spec: Callable[..., ScheduleSpec], text: str
) -> None:
    length = Length(EPOCH, BATCH, 10 * EPOCH)
    rate, expected = (spec(warmup=warmup).build(5e-4, length) for warmup in (text, "50st"))
    seen = range(0, length.total, BATCH)
    assert list(map(rate, seen)) == list(map(expected, seen))


def test_warm_up_and_cool_down_fill_a_run_that_drops_a_partial_batch() -> None:
    """duration=1ep of 100 samples is one step of 64.

    Half an epoch each of warm-up and cool-down is longer than that.
    """
    length = Length(100, 64, 64)
    spec = ConstantCooldownSpec(warmup="0.5ep", cooldown="0.5ep")
    spec.check_fits("1ep", length)
    rate = spec.build(1e-3, length)
    assert rate(0) == 1e-3 and rate(50) == 1e-3 and rate(64) == 0


@pytest.mark.parametrize("name", ["cosine", "constant", "constant_cooldown"])
@pytest.mark.parametrize(("steps", "warmup"), [(1_000_000, 10_000), (200_001, 10_000), (1000, 50), (10, 0.5)])
def test_the_default_warm_up_is_10000_steps_and_at_most_a_twentieth_of_the_run(
    name: str, steps: int, warmup: float
) -> None:
    spec = compose(f"schedule={name}", "data=csv").schedule  # data without a recipe
    length = Length(EPOCH, BATCH, steps * BATCH)
    spec.check_fits(f"{steps}st", length)
    expected = type(spec)(warmup=f"{round(warmup * BATCH)}sa").build(1e-3, length)
    rate = spec.build(1e-3, length)
    seen = [round(share * length.total) for share in (0, 0.001, 0.0099, 0.02, 0.049, 0.05, 0.5, 0.9, 1)]
    assert [rate(n) for n in seen] == [expected(n) for n in seen]


def test_a_short_run_trains_with_the_default_warm_up_and_prints_its_length(tmp_path: Path) -> None:
    trainer = Trainer(small(tmp_path, "schedule=constant_cooldown", "schedule.warmup=auto", "duration=40st"))
    trainer.close()
    assert facts(trainer)["schedule"] == (
        "constant_cooldown; warmup=auto: 64 samples = 2 steps = 5 % of the run; "
        "cooldown=20%: 256 samples = 8 steps = 20 % of the run"
    )
    assert [trainer.learning_rate(32 * step) for step in range(3)] == [5e-4, 1e-3, 1e-3]
