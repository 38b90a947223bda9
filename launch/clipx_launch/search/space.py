"""Search space in Hydra's sweep syntax, as Optuna's distributions.

optimizer.lr=tag(log,interval(1e-4,1e-2))   numbers between two ends, on a logarithmic scale
data.batch_size=interval(16,64)             whole numbers, both ends included, for a key that is a whole number
model.patch_dropout=range(0,0.6,0.1)        numbers in steps, without the end
objective=infonce,siglip                    choices, as choice(infonce,siglip)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep, Sweep, Transformer
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from clipx.config.messages import COMPOSITION_ERRORS, one_line
from clipx.errors import ConfigError, require, require_effect

Space = dict[str, BaseDistribution]


def parse(words: Sequence[str], params: Mapping[str, Any]) -> tuple[list[Override], list[str]]:
    """Returns the overrides with several values, which span the space, and the others. Raises ConfigError.

    Args:
        words: overrides of the command line.
        params: overrides of a YAML file, by key. Those of the command line take precedence.
    """
    parser = OverridesParser.create()
    try:
        typed = parser.parse_overrides(list(words))
        keys = {override.get_key_element().lstrip("+~") for override in typed}
        written = parser.parse_overrides([f"{key}={_text(value)}" for key, value in params.items()])
    except COMPOSITION_ERRORS as error:
        raise ConfigError(one_line(error)) from error
    found = [override for override in written if override.get_key_element().lstrip("+~") not in keys] + typed
    swept = [override for override in found if override.is_sweep_override()]
    require(
        bool(swept),
        "hydra/sweeper=clipx_optuna has nothing to search: give a key several values, such as "
        "optimizer.lr=tag(log,interval(1e-4,1e-2))",
    )
    return swept, [str(override.input_line) for override in found if not override.is_sweep_override()]


def _text(value: Any) -> str:
    """Returns a value of a YAML file as it is typed in an override."""
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    return str(value)


def example(override: Override) -> str:
    """Returns an override with one of its values, to compose a point."""
    value = override.value()
    first = value.start if isinstance(value, IntervalSweep) else _values(override)[0]
    return f"{override.get_key_element()}={first}"


def _values(override: Override) -> list[Any]:
    """Returns the values of a choice or a range. Raises ConfigError."""
    require(
        not isinstance(override.value(), Glob),
        f"{override.input_line} cannot be searched: write the choices, such as objective=infonce,siglip",
    )
    values = list(override.sweep_iterator(transformer=Transformer.encode))
    require(bool(values), f"{override.input_line} has no values: give at least one")
    return values


def distribution(override: Override, whole: Callable[[str], bool]) -> BaseDistribution:
    """Returns the distribution of an override. Raises ConfigError.

    `whole`: whether a key takes whole numbers only.
    """
    try:
        return _distribution(override, whole)
    except ValueError as error:
        raise ConfigError(f"{override.input_line} cannot be searched: {' '.join(str(error).split())}") from error


def _distribution(override: Override, whole: Callable[[str], bool]) -> BaseDistribution:
    value = override.value()
    allowed = {"log"} if isinstance(value, IntervalSweep) else set()
    tags = value.tags - allowed if isinstance(value, Sweep) else set()
    require_effect(
        not tags,
        f"the tag {', '.join(sorted(tags))} of {override.input_line}",
        "in a search space",
        "remove it: the only tag is log, of an interval",
    )
    if isinstance(value, IntervalSweep):
        start, end, log = value.start, value.end, "log" in value.tags
        assert start is not None and end is not None
        cast = isinstance(start, int) and isinstance(end, int)  # by int(interval(…))
        if cast or (whole(override.get_key_element()) and float(start).is_integer() and float(end).is_integer()):
            return IntDistribution(int(start), int(end), log=log)
        return FloatDistribution(float(start), float(end), log=log)
    values = _values(override)
    if isinstance(value, RangeSweep) and not value.shuffle:
        low, high, step = min(values), max(values), abs(value.step)
        if all(isinstance(number, int) for number in (low, high, step)):
            return IntDistribution(low, high, step=int(step))
        low, step = float(low), float(step)
        return FloatDistribution(low, round(low + round((float(high) - low) / step) * step, 12), step=step)
    return CategoricalDistribution(values)


def combinations(space: Space) -> list[dict[str, Any]]:
    """Returns all combinations of values, in order. Raises ConfigError for an interval."""
    values = {key: _all_values(key, found) for key, found in space.items()}
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _all_values(key: str, found: BaseDistribution) -> Sequence[Any]:
    if isinstance(found, CategoricalDistribution):
        return found.choices
    if isinstance(found, IntDistribution) and not found.log:
        return range(found.low, found.high + 1, found.step)
    require(
        isinstance(found, FloatDistribution) and found.step is not None,
        f"{key} has an interval, which hydra.sweeper.sampler=grid cannot enumerate: write choice(…) or range(…)",
    )
    assert isinstance(found, FloatDistribution) and found.step is not None
    count = round((found.high - found.low) / found.step) + 1
    return [round(found.low + i * found.step, 12) for i in range(count)]


def suggest(trial: Trial, space: Space) -> list[str]:
    """Returns the overrides of a trial, and proposes the values that it does not have yet."""
    return [f"{key}={_suggest(trial, key, found)}" for key, found in space.items()]


def _suggest(trial: Trial, key: str, found: BaseDistribution) -> Any:
    if isinstance(found, CategoricalDistribution):
        return trial.suggest_categorical(key, found.choices)
    if isinstance(found, IntDistribution):
        return trial.suggest_int(key, found.low, found.high, step=found.step, log=found.log)
    assert isinstance(found, FloatDistribution)
    return trial.suggest_float(key, found.low, found.high, step=found.step, log=found.log)
