"""Search space in Hydra's sweep syntax, as Optuna's distributions.

optimizer.lr=tag(log,interval(1e-4,1e-2))   numbers between two ends, on a logarithmic scale
data.batch_size=interval(16,64)             whole numbers, both ends included, for a key that is a whole number
model.patch_dropout=range(0,0.6,0.1)        numbers in steps, without the end
objective=infonce,siglip                    choices, as choice(infonce,siglip)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from omegaconf import DictConfig, OmegaConf
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from clipx.config.messages import COMPOSITION_ERRORS, one_line
from clipx.errors import ConfigError, require, require_effect
from clipx_launch.search.check import optuna_errors

Space = dict[str, BaseDistribution]


def parse(
    words: Sequence[str], params: Mapping[str, Any], loader: ConfigLoader | None = None
) -> tuple[list[Override], list[str]]:
    """Returns the overrides with several values, which span the space, and the others. Raises ConfigError.

    `params`: overrides of a YAML file, by key; those of the command line, `words`, take precedence. `loader`: Hydra's,
    which knows the options that glob(…) selects.
    """
    parser = OverridesParser.create(loader)
    try:
        typed = parser.parse_overrides(list(words))
        keys = {override.key_or_group for override in typed}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in params.items()}
        written = [f"{key}={text}" for key, text in texts.items() if key.lstrip("+~") not in keys]
        found = [*parser.parse_overrides(written), *typed]
    except COMPOSITION_ERRORS as error:
        raise ConfigError(one_line(error)) from error
    swept = [override for override in found if override.is_sweep_override()]
    require(
        bool(swept),
        "hydra/sweeper=clipx_optuna has nothing to search: give a key several values, such as "
        "optimizer.lr=tag(log,interval(1e-4,1e-2))",
    )
    return swept, [str(override.input_line) for override in found if not override.is_sweep_override()]


def example(override: Override) -> str:
    """Returns an override with one of its values, to compose a point."""
    value = override.value()
    first = value.start if isinstance(value, IntervalSweep) else _values(override)[0]
    if isinstance(first, float) and first.is_integer():  # Hydra reads interval(16,64) as floats, which 16 cannot be
        first = int(first)
    return f"{override.get_key_element()}={first}"


def combinations(swept: Sequence[Override]) -> list[dict[str, Any]]:
    """Returns all combinations of values by key, in order. Raises ConfigError for an interval."""
    keys = [override.get_key_element() for override in swept]
    for key, override in zip(keys, swept, strict=True):
        require(
            not isinstance(override.value(), IntervalSweep),
            f"{key} has an interval, which hydra.sweeper.sampler=grid cannot enumerate: write choice(…) or range(…)",
        )
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*map(_values, swept))]


def _values(override: Override) -> list[Any]:
    """Returns the values of a choice or a range. Raises ConfigError."""
    values: list[Any] = list(override.sweep_iterator(transformer=Transformer.encode))
    require(bool(values), f"{override.input_line} has no values: give at least one")
    if isinstance(override.value(), RangeSweep):  # Hydra adds up the steps: 0.7000000000000001
        return [round(value, 12) for value in values]
    return values


def space_of(swept: Sequence[Override], cfg: DictConfig) -> Space:
    """Returns the distributions by key. Raises ConfigError. `cfg`: a configuration with the examples of `swept`."""
    space = {}
    for override in swept:
        key = override.get_key_element()
        whole = isinstance(OmegaConf.select(cfg, key.lstrip("+")), int)  # a float's key has converted the example
        space[key] = distribution(override, whole)
    return space


def distribution(override: Override, whole: bool) -> BaseDistribution:
    """Returns the distribution of an override. Raises ConfigError. `whole`: its key takes whole numbers only."""
    value, text = override.value(), str(override.input_line)
    tags: set[str] = getattr(value, "tags", set()) - ({"log"} if isinstance(value, IntervalSweep) else set())
    reason, fix = "in a search space", "remove it: the only tag is log, of an interval"
    require_effect(not tags, f"the tag {', '.join(sorted(tags))} of {text}", reason, fix)
    with optuna_errors(text):
        if isinstance(value, IntervalSweep):
            low, high, log = value.start, value.end, "log" in value.tags
            assert low is not None and high is not None
            whole = whole or isinstance(low, int)  # by int(interval(…))
            if whole and float(low).is_integer() and float(high).is_integer():
                return IntDistribution(int(low), int(high), log=log)
            return FloatDistribution(low, high, log=log)
        values = _values(override)
        if not isinstance(value, RangeSweep) or value.shuffle:
            return CategoricalDistribution(values)
        low, high, step = min(values), max(values), abs(value.step)
        if all(isinstance(number, int) for number in (low, high, step)):
            return IntDistribution(low, high, step=int(step))
        return FloatDistribution(low, high, step=step)


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
