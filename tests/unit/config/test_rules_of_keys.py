"""Rules that keys declare at their field: bounds, choices and conditions, of every option of every group."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import typing
from typing import Any, ClassVar

import pytest
from helpers.specs import specs
from hypothesis import given
from hypothesis import strategies as st

from clipx.config.options import Found, Rules, When, check_options, default_of, facts, option, rules_of
from clipx.config.registry import MISSING, frozen, kinds
from clipx.errors import ConfigError
from clipx.trainer.spec import RunSpec

Key = tuple[type, "dataclasses.Field[Any]", Rules]


@functools.cache
def keys() -> list[Key]:
    """Returns every key with rules: its class, field and rules."""
    return [(cls, f, rules) for cls in specs() for f in dataclasses.fields(cls) if (rules := rules_of(f)) is not None]


def name_of(key: Key) -> str:
    return f"{key[0].__name__}.{key[1].name}"


def is_whole(key: Key) -> bool:
    """Returns whether the key is a whole number, or a text that may be one."""
    return "float" not in str(key[1].type)


def steps(key: Key, bound: float) -> tuple[float, float]:
    """Returns the neighbours of a bound, below and above it, among the values of a key."""
    if is_whole(key):
        return math.ceil(bound) - 1, math.floor(bound) + 1
    return math.nextafter(bound, -math.inf), math.nextafter(bound, math.inf)


def inside_and_outside(key: Key) -> tuple[list[float], list[float]]:
    """Returns numbers at the bounds of a key and next to them: valid ones, and others."""
    rules = key[2]
    inside, outside = [], []
    for bound, closed, low in (
        (rules.ge, True, True),
        (rules.gt, False, True),
        (rules.le, True, False),
        (rules.lt, False, False),
    ):
        if bound is not None:
            below, above = steps(key, bound)
            inside += [bound] * closed + [above if low else below]
            outside += [bound] * (not closed) + [below if low else above]
    return inside, outside


def made(key: Key, number: float) -> Any:
    """Returns a value of the type of a key with this number."""
    hint, rules = str(key[1].type), key[2]
    value: Any = int(number) if is_whole(key) else float(number)
    if rules.choices:
        return str(value)
    return [value] * (rules.length or 1) if hint.startswith("list") else value


def checked(key: Key, value: Any) -> None:
    """Checks one value of a key, as `check_options` does in a spec."""
    rules = dataclasses.replace(key[2], when=None, check=None)
    field = dataclasses.field(metadata={"rules": rules})
    holder = dataclasses.make_dataclass("Holder", [(key[1].name, key[1].type, field)])
    check_options(holder(**{key[1].name: value}), "group.")


@pytest.mark.parametrize("key", keys(), ids=name_of)
def test_a_key_accepts_its_bounds_and_refuses_what_is_next_to_them(key: Key) -> None:
    inside, outside = inside_and_outside(key)
    if (default := default_of(key[1])) not in (None, MISSING):
        checked(key, default)
    for number in inside:
        checked(key, made(key, number))
    wrong = [made(key, number) for number in outside]
    if key[2].choices:
        for choice in key[2].choices:
            checked(key, choice)
        wrong.append("no-such-choice")
    if key[2].length is not None and inside:
        wrong += [made(key, inside[0]) * 2, []]
    for value in wrong:
        with pytest.raises(ConfigError) as raised:
            checked(key, value)
        says = str(raised.value)
        assert says.startswith(f"group.{key[1].name}=") and f" must be {key[2].expected}" in says, says
        assert re.search(r": \S", says) and "\n" not in says, says


@given(st.data())
def test_a_number_is_accepted_if_and_only_if_it_is_in_the_interval(data: st.DataObject) -> None:
    bounds = {name: data.draw(st.none() | st.integers(-3, 3), label=name) for name in ("ge", "gt", "le", "lt")}
    number = data.draw(st.integers(-4, 4) | st.floats(-4, 4))
    rules = Rules(**bounds, choices=(), length=None, when=None, unit="", hint="", check=None)
    right = (
        not (bounds["ge"] is not None and number < bounds["ge"])
        and not (bounds["gt"] is not None and number <= bounds["gt"])
        and not (bounds["le"] is not None and number > bounds["le"])
        and not (bounds["lt"] is not None and number >= bounds["lt"])
    )
    assert rules.accepts(number) == right
    assert rules.accepts([number, number]) == right


# ----------------------------------------------------------------------------------------------------- conditions


@pytest.mark.parametrize("key", [key for key in keys() if key[2].when is not None], ids=name_of)
def test_a_condition_names_keys_that_exist_and_values_that_they_may_have(key: Key) -> None:
    condition = key[2].when
    assert condition is not None and key[1].name not in condition.keys
    for term in itertools.chain(*condition.alternatives):
        hints = [hint for hint in (hint_of(cls, term.key) for cls in (key[0], RunSpec)) if hint is not None]
        assert hints, f"{term.key} is no key of {key[0].__name__} or of a run"
        members = getattr(hints[0], "__members__", None)
        assert members is None or set(term.values) <= set(members), (term.key, term.values)


def hint_of(cls: Any, key: str) -> Any:
    """Returns the type of a key below a class, of a class variable or a property; None: there is none."""
    first, _, rest = key.partition(".")
    hints = typing.get_type_hints(cls)
    if first not in hints:
        return bool if not rest and hasattr(cls, first) else None
    if not rest:
        return hints[first]
    options = kinds(first).values() if dataclasses.is_dataclass(cls) and cls is RunSpec else ()
    found = (hint_of(of, rest) for of in (hints[first], *options) if dataclasses.is_dataclass(of))
    return next((hint for hint in found if hint is not None), None)


@frozen
class InnerSpec:
    rank: int = option(0, ge=0)
    scale: float = option(1.0, when="rank")


@frozen
class _Outer:
    mode: str = option("off", choices=("off", "on", "slow"))
    every: str = "none"
    flag: bool = False
    known: ClassVar[bool] = True
    delay: int = option(3, ge=1, when="mode in on, slow")
    limit: int | None = option(None, le=9, when="every and not flag")
    either: int = option(0, when="flag or every")
    share: float = option(0.5, when="delay > 4")
    other: int = option(0, when="mode != off")
    inner: InnerSpec = dataclasses.field(default_factory=InnerSpec)
    list: list[InnerSpec] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"delay": 4}, "delay=4 has no effect with a.mode=off: set a.mode=on or slow, or remove it"),
        ({"limit": 1}, "limit=1 has no effect without a.every: give a.every, or remove it"),
        (
            {"limit": 1, "every": "1st", "flag": True},
            "limit=1 has no effect with a.flag=true: remove a.flag, or remove it",
        ),
        (
            {"either": 1},
            "either=1 has no effect with a.flag=false and without a.every: set a.flag=true or give a.every, or remove it",
        ),
        ({"share": 0.1}, "share=0.1 has no effect with a.delay=3: give a.delay above 4, or remove it"),
        ({"other": 1}, "other=1 has no effect with a.mode=off: choose another a.mode, or remove it"),
        ({"mode": "of"}, "mode=of must be off, on or slow: the default is off (did you mean off?)"),
        ({"limit": 10}, "limit=10 must be at most 9, or null: give one"),
        (
            {"inner": InnerSpec(scale=2)},
            "inner.scale=2 has no effect with a.inner.rank=0: give a.inner.rank, or remove it",
        ),
        ({"list": [InnerSpec(), InnerSpec(rank=-1)]}, "list.1.rank=-1 must be at least 0: the default is 0"),
    ],
)
def test_the_sentence_names_key_value_rule_and_fix(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_options(_Outer(**values), "a.")
    assert str(raised.value) == f"a.{says}"


def test_a_key_that_has_an_effect_or_its_default_is_accepted() -> None:
    check_options(_Outer(mode="on", delay=5, share=0.1, other=1, inner=InnerSpec(rank=1, scale=2)), "a.")
    check_options(_Outer(every="1st", limit=1, either=1), "a.")
    check_options(_Outer(flag=True, either=1), "a.")


def test_null_is_no_choice_of_an_optional_key() -> None:
    spec = dataclasses.make_dataclass("Spec", [("step", "str | None", option(None, choices=("all",), ge=0))])()
    check_options(spec, "a.")
    assert spec.step is None


def test_a_condition_on_the_run_is_checked_with_the_run() -> None:
    root = dataclasses.make_dataclass("Run", [("group", Any), ("kind", str)])(_Outer(), "run")
    part = dataclasses.make_dataclass("Part", [("size", int, option(0, when="group.flag"))])
    check_options(part(1), "part.")  # its run is not known
    with pytest.raises(ConfigError, match=r"^part\.size=1 has no effect with group\.flag=false: set group\.flag=true"):
        check_options(part(1), "part.", root)
    class_variable = dataclasses.make_dataclass("Part", [("size", int, option(0, when="not group.known"))])
    root.group = dataclasses.make_dataclass("Kind", [("kind", str), ("known", ClassVar[bool], True)])("x")
    with pytest.raises(ConfigError, match=r"^part\.size=1 has no effect with group=x: choose another group, or remove"):
        check_options(class_variable(1), "part.", root)


def test_help_prints_the_rules() -> None:
    printed = {f.name: facts(f) for f in dataclasses.fields(_Outer)}
    assert printed["delay"] == ["at least 1", "only if mode in on, slow"]
    assert printed["mode"] == ["off, on or slow"]
    assert printed["flag"] == []


def test_an_unreadable_condition_is_an_error_of_its_author() -> None:
    with pytest.raises(ValueError, match="is no term of a condition"):
        When.parse("a = b")
    found = When.parse("a")
    assert found is not None and found.missing(lambda key: Found(key, 1)) is None
