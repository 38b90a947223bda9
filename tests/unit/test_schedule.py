"""Durations, cadences and learning rates compared with their definitions, step by step in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.runs import compose
from hypothesis import given
from hypothesis import strategies as st
from open_clip_train import scheduler as open_clip  # type: ignore[import-untyped]

from clipx.config.duration import Cadence, Duration, Interval, Length
from clipx.schedule import ConstantCooldownSpec, ConstantScheduleSpec, CosineSpec, ScheduleSpec

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


def due_samples(cadence: Interval, batch: int, total: int) -> list[int]:
    return [after for after in range(batch, total + 1, batch) if cadence.due(after - batch, after)]


@given(period=st.integers(1, 2000), batch=st.integers(1, 2000), steps=st.integers(1, 50))
def test_a_cadence_is_due_at_the_first_step_that_reaches_each_multiple(period: int, batch: int, steps: int) -> None:
    cadence, total = Cadence.parse(f"{period}sa", "c").on(Length(EPOCH, BATCH), "c"), steps * batch
    assert cadence == Interval(period, at_end=True)
    assert due_samples(cadence, batch, total) == sorted(
        {-(-multiple // batch) * batch for multiple in range(period, total + 1, period)}
    )


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


@pytest.mark.parametrize("text", ["5%", "0.5ep", "3200sa"])
@pytest.mark.parametrize("spec", [CosineSpec, ConstantScheduleSpec, ConstantCooldownSpec])
def test_a_warm_up_in_any_unit_and_as_a_share_gives_the_same_rates(
    spec: Callable[..., ScheduleSpec], text: str
) -> None:
    length = Length(EPOCH, BATCH, 10 * EPOCH)
    rate, expected = (spec(warmup=warmup).build(5e-4, length) for warmup in (text, "50st"))
    seen = range(0, length.total, BATCH)
    assert list(map(rate, seen)) == list(map(expected, seen))


@pytest.mark.parametrize("name", ["cosine", "constant", "constant_cooldown"])
@pytest.mark.parametrize(("steps", "warmup"), [(1_000_000, 10_000), (200_001, 10_000), (1000, 50), (10, 0.5)])
def test_the_default_warm_up_is_10000_steps_and_at_most_a_twentieth_of_the_run(
    name: str, steps: int, warmup: float
) -> None:
    spec = compose(f"schedule={name}", "data=csv").schedule  # data without a recipe
    length = Length(EPOCH, BATCH, steps * BATCH)
    spec.check_fits(Duration.parse(f"{steps}st", "duration"), length)
    expected = type(spec)(warmup=f"{round(warmup * BATCH)}sa").build(1e-3, length)
    rate = spec.build(1e-3, length)
    seen = [round(share * length.total) for share in (0, 0.001, 0.0099, 0.02, 0.049, 0.05, 0.5, 0.9, 1)]
    assert [rate(n) for n in seen] == [expected(n) for n in seen]
