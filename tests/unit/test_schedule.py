"""Durations, cadences and learning rates compared with their definitions, step by step in float64."""

from __future__ import annotations

import math
import re
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
        ("2.5sa", 2),  # rounds half to even, like Python
    ],
)
def test_a_duration_is_a_number_times_a_unit(text: str, samples: int) -> None:
    assert Duration.parse(text, "duration").samples(Length(EPOCH, BATCH)) == samples


def test_equal_lengths_in_different_units_are_equal_numbers_of_samples() -> None:
    lengths = {
        Duration.parse(text, "d").samples(Length(EPOCH, BATCH)) for text in ("3ep", "300st", "19200sa", "1.92e4sa")
    }
    assert lengths == {19_200}


def test_published_sample_counts_are_exact() -> None:
    assert Duration.parse("32ep", "d").samples(Length(414_080_000, 32_768)) == 32 * 414_080_000
    assert Duration.parse("1e15sa", "d").samples(Length(1, 1)) == 10**15


@pytest.mark.parametrize(
    ("text", "samples"),
    [("20%", 20_000), ("0%", 0), ("100%", 100_000), ("33.3%", 33_300), (" 5 %", 5000), ("1e1%", 10_000)],
)
def test_a_share_refers_to_the_whole_run(text: str, samples: int) -> None:
    assert Duration.parse(text, "schedule.warmup", share=True).samples(Length(EPOCH, BATCH, 100_000)) == samples


@pytest.mark.parametrize("key", ["duration", "log_every", "checkpoint.every"])
def test_a_share_is_rejected_where_it_has_no_meaning(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(f"{key}=50%")
    message = re.sub(r" \(or none, or end[^)]*\)", "", str(caught.value))
    assert message.startswith(f"{key}=50% is not a duration here: give a number and its unit, e.g. 32ep (epochs)")
    assert "%)" not in message and "of the run" not in message


def test_the_error_lists_a_share_where_it_is_valid() -> None:
    with pytest.raises(ConfigError, match=r"^schedule\.warmup=20 is not a duration: .*, 20% \(of the run\) or "):
        compose("schedule.warmup=20")


def test_a_share_above_100_percent_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^schedule\.warmup=101% is too long: give at most 100%$"):
        compose("schedule.warmup=101%")


@pytest.mark.parametrize("text", ["", "32", "ep", "32 epochs", "-1ep", "1e-3ep", "32EP", "3.2.1ep", "infep", "1ep 2st", "0x10st"])  # fmt: skip
def test_an_invalid_duration_is_rejected_with_examples(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Duration.parse(text, "checkpoint.every")
    message = str(caught.value)
    assert message.startswith(f"checkpoint.every={text} is not a duration: give a number and its unit")
    assert "32ep" in message and "10000st" in message and "12.8e9sa" in message


@pytest.mark.parametrize("text", ["1e16sa", "1e300ep", "1e400st", "9" * 400 + "sa"])
def test_a_duration_too_long_to_count_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^duration=.* is too long: give at most 1e\+15(sa|ep|st)$"):
        Duration.parse(text, "duration")


# --------------------------------------------------------------------------------------------------- cadences


def due_samples(cadence: Cadence, batch: int, total: int) -> list[int]:
    return [after for after in range(batch, total + 1, batch) if cadence.due(after - batch, after)]


def test_a_cadence_is_due_once_at_each_multiple_of_its_period() -> None:
    cadence = Cadence.parse("300sa", "c", Length(EPOCH, BATCH))
    assert cadence == Cadence(300, at_end=True)
    # The first step that reaches 300, 600, …; never twice for a multiple.
    assert due_samples(cadence, 64, 1280) == [320, 640, 960, 1216]
    assert len(due_samples(cadence, 64, 64 * 750)) == 64 * 750 // 300


@pytest.mark.parametrize("batch", [1, 7, 64, 100, 300, 301, 1000])
def test_a_cadence_marks_the_same_samples_for_every_batch_size(batch: int) -> None:
    cadence = Cadence(300, at_end=True)
    total = 21_000
    expected = sorted({-(-multiple // batch) * batch for multiple in range(300, total + 1, 300)})
    assert due_samples(cadence, batch, total) == [after for after in expected if after <= total]


def test_a_period_shorter_than_a_step_is_due_at_every_step() -> None:
    assert due_samples(Cadence.parse("1sa", "c", Length(EPOCH, BATCH)), 64, 640) == list(range(64, 641, 64))


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
    assert due_samples(cadence, 64, 64_000) == []


def test_a_huge_period_is_due_only_at_the_end() -> None:
    cadence = Cadence.parse("1e15ep", "c", Length(2_320_000_000, 32_768))
    assert cadence.period == pytest.approx(1e15 * 2_320_000_000)
    assert not cadence.due(0, 10**18)
    assert cadence.at_end


@pytest.mark.parametrize("text", ["0ep", "0st", "0.001sa"])
def test_a_cadence_below_one_sample_is_rejected(text: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^checkpoint\.every={text} is less than one sample: give a longer duration"
    ):
        Cadence.parse(text, "checkpoint.every", Length(EPOCH, BATCH))


@pytest.mark.parametrize("text", ["never", "", "0ep", "1", "End"])
def test_an_invalid_cadence_is_rejected_before_the_data_is_known(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint\.every"):
        check_cadence(text, "checkpoint.every")


@pytest.mark.parametrize("text", ["none", "end", "1ep", "500st", "1e6sa", "1e15ep"])
def test_a_valid_cadence_is_accepted_before_the_data_is_known(text: str) -> None:
    check_cadence(text, "checkpoint.every")


# ---------------------------------------------------------------------------------------------- learning rates


def reference(step: int, warmup: int, total: int, base: float, tail: Callable[[float], float]) -> float:
    """Returns the definition of the recipe in steps: base·(step+1)/warmup, then `tail` of the share done."""
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
    rate = ConstantScheduleSpec(warmup=f"{warmup}st").build(5e-4, Length(EPOCH, BATCH, 300 * BATCH))
    for step in range(300):
        assert rate(step * BATCH) == pytest.approx(reference(step, warmup, 300, 5e-4, lambda _: 5e-4), rel=1e-13)


def test_cosine_begins_at_the_peak_and_ends_at_the_minimum() -> None:
    rate = CosineSpec(warmup="10st", min_lr=1e-6).build(1e-3, Length(EPOCH, BATCH, 100 * BATCH))
    assert rate(0) == pytest.approx(1e-4)
    assert rate(9 * BATCH) == rate(10 * BATCH) == 1e-3
    assert rate(100 * BATCH) == pytest.approx(1e-6)
    assert rate(1000 * BATCH) == pytest.approx(1e-6)  # does not rise again


@pytest.mark.parametrize("text", ["2ep", "200st", "12800sa"])
@pytest.mark.parametrize("spec", [CosineSpec, ConstantScheduleSpec])
def test_a_warm_up_in_any_unit_gives_the_same_rates(
    spec: type[CosineSpec] | type[ConstantScheduleSpec], text: str
) -> None:
    total = 10 * EPOCH
    rate = spec(warmup=text).build(5e-4, Length(EPOCH, BATCH, total))
    expected = spec(warmup="200st").build(5e-4, Length(EPOCH, BATCH, total))
    assert [rate(seen) for seen in range(0, total, BATCH)] == [expected(seen) for seen in range(0, total, BATCH)]


@pytest.mark.parametrize("batch", [1, 32, 64, 128, 640])
def test_the_rate_by_samples_does_not_depend_on_the_batch_size(batch: int) -> None:
    """The rate is a function of the samples seen after the warm-up, and of the samples at the step's end within it."""
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


@pytest.mark.parametrize("spec", [CosineSpec, ConstantScheduleSpec, ConstantCooldownSpec])
def test_a_warm_up_as_a_share_of_the_run_gives_the_same_rates(spec: Callable[..., ScheduleSpec]) -> None:
    length = Length(EPOCH, BATCH, 10 * EPOCH)
    rate, expected = (spec(warmup=text).build(5e-4, length) for text in ("5%", "50st"))
    assert [rate(seen) for seen in range(0, length.total, BATCH)] == [
        expected(seen) for seen in range(0, length.total, BATCH)
    ]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("min_lr", [0.0, 1e-5])
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


def test_constant_cooldown_at_its_edges() -> None:
    spec = ConstantCooldownSpec(warmup="10st", cooldown="20%", min_lr=1e-5)
    rate = spec.build(1e-3, Length(EPOCH, BATCH, 100 * BATCH))
    assert rate(0) == pytest.approx(1e-4)  # the first step: one tenth
    # until the first step of the cool-down
    assert rate(9 * BATCH) == rate(10 * BATCH) == rate(79 * BATCH) == rate(80 * BATCH) == 1e-3
    assert rate(81 * BATCH) == pytest.approx(1e-5 + 0.99e-3 * 19 / 20)
    assert rate(99 * BATCH) == pytest.approx(1e-5 + 0.99e-3 / 20)  # the last step
    assert rate(100 * BATCH) == rate(1000 * BATCH) == pytest.approx(1e-5)


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


@pytest.mark.parametrize("spec", [CosineSpec, ConstantCooldownSpec])
def test_a_minimum_below_zero_or_above_the_peak_is_rejected(
    spec: type[CosineSpec] | type[ConstantCooldownSpec],
) -> None:
    with pytest.raises(ConfigError, match=r"^schedule\.min_lr=-1e-05 is negative: give 0"):
        spec(warmup="1st", min_lr=-1e-5)
    with pytest.raises(
        ConfigError, match=r"^schedule\.min_lr=0\.01 is above optimizer\.lr=0\.001: give at most 0\.001"
    ):
        spec(warmup="1st", min_lr=1e-2).check(1e-3)
    spec(warmup="1st", min_lr=1e-3).check(1e-3)
    ConstantScheduleSpec(warmup="1st").check(1e-3)


# ------------------------------------------------------------------------------------------------ fit into the run

COOL = "schedule=constant_cooldown"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((COOL, "schedule.cooldown=soon"), "schedule.cooldown=soon is not a duration: give a number and its unit"),
        ((COOL, "schedule.power=0"), "schedule.power=0.0 must be above 0: 1.0 is linear"),
        (
            (COOL, "optimizer.lr=1e-4", "schedule.min_lr=1e-3"),
            "schedule.min_lr=0.001 is above optimizer.lr=0.0001: give at most 0.0001",
        ),
        (
            (COOL, "schedule.warmup=60%", "schedule.cooldown=41%"),
            "schedule.warmup=60% and schedule.cooldown=41% are longer than duration=9ep: shorten them or train longer",
        ),
        (
            (COOL, "duration=100st", "schedule.warmup=81st"),
            "schedule.warmup=81st and schedule.cooldown=20% are longer than duration=100st: shorten them or train longer",
        ),
        (
            (COOL, "data.batch_size=100", "duration=100st", "schedule.warmup=50st", "schedule.cooldown=5001sa"),
            "schedule.warmup=50st and schedule.cooldown=5001sa are longer than duration=100st: "
            "shorten them or train longer",
        ),
        (
            (COOL, "duration=4ep", "schedule.warmup=1st", "schedule.cooldown=5ep"),
            "schedule.warmup=1st and schedule.cooldown=5ep are longer than duration=4ep: shorten them or train longer",
        ),
        (("schedule.power=2",), "schedule.power is not a key here: the keys are warmup, min_lr"),
        (("schedule=constant", "schedule.min_lr=0"), "schedule.min_lr is not a key here: the keys are warmup"),
    ],
)
def test_parts_longer_than_the_run_are_rejected_at_composition(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(*overrides)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule.warmup=100%",),
        (COOL, "schedule.warmup=80%"),
        (COOL, "duration=3ep", "schedule.warmup=1ep", "schedule.cooldown=2ep"),
        (COOL, "duration=0.3ep", "schedule.warmup=0.1ep", "schedule.cooldown=0.2ep"),  # 0.1 + 0.2 > 0.3
        (COOL, "duration=1ep", "schedule.warmup=10000st"),  # known only when the data is opened
        (COOL, "optimizer.lr=1e-3", "schedule.min_lr=1e-3"),
    ],
)
def test_parts_that_fit_into_the_run_compose(overrides: tuple[str, ...]) -> None:
    compose(*overrides)


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


def test_the_default_warm_up_fits_with_a_cool_down_of_up_to_the_rest_of_the_run() -> None:
    compose(COOL, "data=csv", "duration=300st", "schedule.cooldown=95%")
    with pytest.raises(
        ConfigError, match=r"^schedule\.warmup=auto and schedule\.cooldown=96% are longer than duration="
    ):
        compose(COOL, "data=csv", "duration=300st", "schedule.cooldown=96%")
    with pytest.raises(ConfigError, match=r"^schedule\.cooldown=auto is not a duration"):
        compose(COOL, "schedule.cooldown=auto")


def test_a_short_run_trains_with_the_default_warm_up_and_prints_its_length(tmp_path: Path) -> None:
    trainer = Trainer(small(tmp_path, "schedule=constant_cooldown", "schedule.warmup=auto", "duration=40st"))
    trainer.close()
    assert facts(trainer)["schedule"] == (
        "constant_cooldown; warmup=auto: 64 samples = 2 steps = 5 % of the run; "
        "cooldown=20%: 256 samples = 8 steps = 20 % of the run"
    )
    assert [trainer.learning_rate(32 * step) for step in range(3)] == [5e-4, 1e-3, 1e-3]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("schedule=constant_cooldown", "schedule.warmup=2st", "schedule.cooldown=0.5ep"),
            "schedule.warmup=2st and schedule.cooldown=0.5ep are 192 samples, longer than duration=4st of 128: "
            "shorten them or train longer",
        ),
        (
            ("schedule.warmup=1ep",),
            "schedule.warmup=1ep is 256 samples, longer than duration=4st of 128: shorten the warm-up or train longer",
        ),
    ],
)
def test_parts_longer_than_the_run_are_rejected_when_the_data_is_opened(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(small(tmp_path, *overrides))
    assert str(caught.value) == message
