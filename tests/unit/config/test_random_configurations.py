"""Random configurations, right and wrong ones, drawn from the types and rules of all keys of a run.

A right one sets keys to values that their own rules allow; rules between keys may refuse it. A wrong one has one value
that no rule allows, and is refused with the key, the value, the rule and the fix in one line.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import random
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.cases import slow_except
from helpers.runs import NEEDED, compose

from clipx.config.options import Rules, rules_of, typed
from clipx.config.registry import CONF_DIR, MISSING, option_files
from clipx.errors import ClipxError
from clipx.trainer.spec import RunSpec

SEEDS = range(20)
EACH = 20  # configurations of each sort for a seed
SHARING = 4  # configurations with the same options of groups, whose composition is shared
GROUPS = ("model", "data", "objective", "optimizer", "schedule", "precision", "distributed", "checkpoint")
LISTS = ("evaluator", "logger")
FREE = {"name", "run_dir", "kind", "model.name", "data.name"}  # texts that are not drawn


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a run: its name, type without null, whether it may be null, and rules."""

    name: str
    hint: Any
    optional: bool
    rules: Rules | None


def keys(spec: Any, prefix: str = "") -> Iterator[Key]:
    """Yields the keys of a spec and of the specs in it that have values of a kind that can be drawn."""
    hints = typing.get_type_hints(type(spec))
    for field in dataclasses.fields(spec):
        name, hint, value = f"{prefix}{field.name}", hints[field.name], getattr(spec, field.name)
        parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        of = next(part for part in parts if part is not types.NoneType)
        if dataclasses.is_dataclass(value):
            yield from keys(value, f"{name}.")
        elif of is dict or typing.get_origin(of) is dict:
            for key, part in value.items() if isinstance(value, dict) else ():
                if dataclasses.is_dataclass(part):
                    yield from keys(part, f"{name}.{key}.")
        elif name not in FREE and field.name != "kind" and can_be_drawn(of, rules_of(field)):
            yield Key(name, of, types.NoneType in parts, rules_of(field))


def can_be_drawn(hint: Any, rules: Rules | None) -> bool:
    if hint in (int, float, bool) or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return True
    if hint is str:
        return rules is not None and (bool(rules.choices) or duration_of(rules))
    return typing.get_origin(hint) is list and rules is not None and rules.length is not None


def duration_of(rules: Rules) -> bool:
    return "a_duration" in getattr(rules.check, "__qualname__", "")


def right(key: Key, rng: random.Random) -> Any:
    """Draws a value that the rules of a key allow."""
    if key.optional and rng.random() < 0.2:
        return None
    hint, rules = key.hint, key.rules
    if hint is bool:
        return rng.random() < 0.5
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return rng.choice(list(hint))
    if hint is str:
        assert rules is not None
        if rules.choices and not (rules.bounds and rng.random() < 0.5):
            return rng.choice(rules.choices)
        return str(number(rules, True, rng)) if rules.choices else rng.choice(["3ep", "40st", "5e3sa"])
    if typing.get_origin(hint) is list:
        assert rules is not None
        return [number(rules, False, rng) for _ in range(rules.length or 0)]
    return number(rules, hint is int, rng)


def number(rules: Rules | None, whole: bool, rng: random.Random) -> float:
    low = high = None
    if rules is not None:
        low = rules.ge if rules.ge is not None else rules.gt
        high = rules.le if rules.le is not None else rules.lt
    low = 0 if low is None else low
    high = max(low + 1, 4 * low, 64) if high is None else high
    if whole:
        return rng.randint(
            int(low) + (rules is not None and rules.gt is not None), min(int(high), 10**6 + int(low)) - 1
        )
    return low + (high - low) * rng.uniform(0.01, 0.99)


def wrong(key: Key, rng: random.Random) -> str:
    """Draws an override value that the key refuses."""
    hint, rules = key.hint, key.rules
    words = ["no_such_value", "[no_such_value,a]"]
    if hint is str and rules is not None and not rules.choices:
        words = ["no_such_value", "-1st", "3weeks", "1ep2"]
    if hint in (int, float) or typing.get_origin(hint) is list:
        words += [".nan"] if hint is float else []
        limits = [] if rules is None else [(rules.ge, -1), (rules.gt, 0), (rules.le, 1), (rules.lt, 0)]
        numbers = [typed(bound + step) for bound, step in limits if bound is not None]
        words += numbers if hint in (int, float) else [f"[{n},{n}]" for n in numbers] + ["[]"]
    return rng.choice(words)


@functools.cache
def names(group: str) -> list[str]:
    return sorted(option_files(group))


def choices(rng: random.Random) -> list[str]:
    """Draws options of some groups, with what they need."""
    chosen = []
    for group in rng.sample(GROUPS, rng.randint(0, 3)):
        name = rng.choice([name for name in names(group) if name not in ("weights", "mixture")])
        chosen += [f"{group}={name}", *NEEDED.get(name, ())]
    if rng.random() < 0.3:
        group = rng.choice(LISTS)
        chosen.append(f"{group}=[{','.join(rng.sample(names(group), 2))}]")
    return chosen


def composed(words: list[str]) -> RunSpec | str:
    """Returns the run, or the message of the error. Any other exception is a failure."""
    try:
        return compose("name=x", *words)
    except ClipxError as error:
        return str(error)


def bases(rng: random.Random) -> Iterator[tuple[list[str], list[Key]]]:
    """Draws choices that compose, and yields them with the keys of the run, once for each configuration of a seed."""
    for _ in range(EACH // SHARING):
        while isinstance(spec := composed(words := choices(rng)), str):
            pass
        known = list(keys(spec))
        for _ in range(SHARING):
            yield [*words], known


def check_message(says: str, words: list[str]) -> None:
    assert "\n" not in says and len(says) < 1000, (words, says)
    assert re.search(r": \S|, expected|is not a", says), (words, says)


@pytest.mark.parametrize("seed", slow_except(list(SEEDS), 0))
def test_right_configurations_compose_or_say_which_rule_between_keys_they_break(seed: int) -> None:
    rng, accepted = random.Random(f"right {seed}"), 0
    for words, known in bases(rng):
        for key in rng.sample(known, rng.randint(1, 3)):
            words.append(f"{key.name}={typed(right(key, rng))}")
        found = composed(words)
        if isinstance(found, str):
            check_message(found, words)
            own = [word.partition("=")[0] for word in words]
            assert any(name.rpartition(".")[2] in found for name in own), (words, found)
        else:
            accepted += 1
            assert all(same(found, word) for word in words if "." in word.partition("=")[0]), words
    assert accepted >= EACH // 3


def same(spec: RunSpec, word: str) -> bool:
    """Returns whether a run has the value of an override."""
    key, _, text = word.partition("=")
    value: Any = spec
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return text in ("null", typed(value)) or typed(value) in (text, f"{float(text):g}" if is_number(text) else text)


def is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text) is not None


@pytest.mark.parametrize("seed", slow_except(list(SEEDS), 0))
def test_wrong_configurations_are_refused_with_key_and_value(seed: int) -> None:
    rng = random.Random(f"wrong {seed}")
    for words, known in bases(rng):
        key = rng.choice(known)
        value = wrong(key, rng)
        words.append(f"{key.name}={value}")
        found = composed(words)
        assert isinstance(found, str), f"{words} composes"
        check_message(found, words)
        assert key.name.rpartition(".")[2] in found, (words, found)
        shown = value.strip("[]").split(",")[0].removeprefix(".")
        assert shown in found or is_number(shown), (words, found)


def test_the_names_of_the_groups_are_those_of_the_configuration() -> None:
    assert all((CONF_DIR / group).is_dir() for group in (*GROUPS, *LISTS))
    assert MISSING == "???"
