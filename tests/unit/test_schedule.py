"""Durations, cadences and learning rates compared with their definitions, step by step in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.runs import compose, small
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


@pytest.mark.parametrize("batch", [1, 7, 64, 300, 301, 1000])
def test_a_cadence_is_due_at_the_first_step_that_reaches_each_multiple(batch: int) -> None:
    cadence = Cadence.parse("300sa", "c", Length(EPOCH, BATCH))
    assert cadence == Cadence(300, at_end=True)
    total = 21_000
    expected = sorted({-(-multiple // batch) * batch for multiple in range(300, total + 1, 300)})
    assert due_samples(cadence, batch, total) == [after for after in expected if after <= total]
    assert due_samples(Cadence.parse("1sa", "c", Length(EPOCH, BATCH)), batch, 640) == list(range(batch, 641, batch))


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


@pytest.mark.parametrize("min_lr", [0.0, 1e-5])
@pytest.mark.parametrize("warmup", [0, 1, 30, 300])
def test_cosine_equals_its_definition_at_every_step(warmup: int, min_lr: float) -> None:
    steps, base = 300, 5e-4
    rate = CosineSpec(warmup=f"{warmup}st", min_lr=min_lr).build(base, Length(EPOCH, BATCH, steps * BATCH))
    for step in range(steps):
        expected = base * (step + 1) / warmup if step < warmup else 0.0
        if step >= warmup:
            done = (step - warmup) / (steps - warmup)
            expected = min_lr + (base - min_lr) * (1 + math.cos(math.pi * done)) / 2
        assert rate(step * BATCH) == pytest.approx(expected, rel=1e-13, abs=1e-19), step


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


@pytest.mark.parametrize("batch", [1, 32, 64, 128, 640])
def test_the_rate_by_samples_does_not_depend_on_the_batch_size(batch: int) -> None:
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


@pytest.mark.parametrize("text", ["5%", "0.5ep", "3200sa"])
@pytest.mark.parametrize("spec", [CosineSpec, ConstantScheduleSpec, ConstantCooldownSpec])
def test_a_warm_up_in_any_unit_and_as_a_share_gives_the_same_rates(
    spec: Callable[..., ScheduleSpec], text: str
) -> None:
    length = Length(EPOCH, BATCH, 10 * EPOCH)
    rate, expected = (spec(warmup=warmup).build(5e-4, length) for warmup in (text, "50st"))
    seen = range(0, length.total, BATCH)
    assert list(map(rate, seen)) == list(map(expected, seen))


@pytest.mark.parametrize(("power", "min_lr"), [(0.5, 0.0), (1.0, 1e-5), (2.0, 1e-5)])
@pytest.mark.parametrize(("warmup", "cooldown"), [(0, 300), (30, 60), (1, 1), (100, 200), (30, 0)])
def test_constant_cooldown_equals_its_definition_at_every_step(
    warmup: int, cooldown: int, min_lr: float, power: float
) -> None:
    steps, base = 300, 5e-4
    spec = ConstantCooldownSpec(warmup=f"{warmup}st", cooldown=f"{cooldown}st", min_lr=min_lr, power=power)
    rate = spec.build(base, Length(EPOCH, BATCH, steps * BATCH))
    for step in range(steps):
        if step < warmup:
            expected = base * (step + 1) / warmup
        elif step < steps - cooldown:
            expected = base
        else:
            expected = (1 - (step - (steps - cooldown)) / cooldown) ** power * (base - min_lr) + min_lr
        assert rate(step * BATCH) == pytest.approx(expected, rel=1e-13, abs=1e-19), step


def test_schedules_match_open_clip() -> None:
    base, warmup, steps, cooldown, power, end = 5e-4, 30, 300, 60, 1.5, 1e-6
    length = Length(EPOCH, BATCH, steps * BATCH)
    pairs = [
        (CosineSpec(warmup="30st"), open_clip.cosine_lr(_NoGroups(), base, warmup, steps)),
        (ConstantScheduleSpec(warmup="10%"), open_clip.const_lr(_NoGroups(), base, warmup, steps)),
        (
            ConstantCooldownSpec(warmup="0.3ep", cooldown="20%", power=power, min_lr=end),
            open_clip.const_lr_cooldown(_NoGroups(), base, warmup, steps, cooldown, power, end),
        ),
    ]
    for spec, theirs in pairs:
        rate = spec.build(base, length)
        for step in range(steps):
            assert rate(step * BATCH) == pytest.approx(theirs(step), rel=1e-12), (spec, step)


class _NoGroups:
    param_groups = ()


@pytest.mark.parametrize("batch", [64, 96, 1000])
def test_a_cool_down_that_begins_inside_a_step_falls_monotonically(batch: int) -> None:
    total = 20_000 // batch * batch
    rates = [
        ConstantCooldownSpec(warmup="0sa", cooldown="7777sa").build(5e-4, Length(EPOCH, batch, total))(seen)
        for seen in range(0, total, batch)
    ]
    assert rates[0] == 5e-4 and rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(5e-4 * batch / 7777)


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
