"""`option`: a key of a spec with its rules: bounds, choices, and the condition under which it has an effect.

    momentum: float = option(0.9, ge=0, lt=1, hint="0.9 is usual")
    non_finite_limit: int = option(10, ge=1, when="non_finite != stop")

`check_options` checks the rules of all keys of a spec and writes their sentences; `--help KEY`, the reference and the
JSON schema print them. A rule between several keys that is no condition stays in `__post_init__`, a rule between groups
of a run in `clipx.trainer.rules`.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from omegaconf import MISSING

from clipx.config.specs import complete
from clipx.config.suggestions import did_you_mean
from clipx.errors import ConfigError, without_effect

T = TypeVar("T")
_RULES = "rules"  # key of a field's metadata
_EMPTY: tuple[Any, ...] = (None, "none", "", [], {})
_FEW = 4  # kinds that a message lists
_OFF = (*_EMPTY, False, 0)
_TERM = re.compile(r"(?P<no>not )?(?P<key>[\w.]+)(?: (?P<sign>==|!=|>|in) (?P<value>.+))?")


def option(
    default: T,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] = (),
    length: int | None = None,
    when: str = "",
    unit: str = "",
    hint: str = "",
    check: Callable[[str, Any], object] | None = None,
) -> T:
    """Returns the default of a field of a spec, with rules. A list or dictionary is copied for each spec.

    Args:
        default: None where null is a value, too.
        ge: least value, of each item of a list; of a text with `choices`, the least whole number that it may be.
        gt: number that the value is above.
        le: largest value.
        lt: number that the value is below.
        choices: the texts that the value may be.
        length: number of items of a list.
        when: condition under which another value than the default has an effect: terms joined by `and` and `or`. A term
            is `KEY` (not null, false, 0, none or empty), `not KEY`, `KEY == VALUE`, `KEY != VALUE`, `KEY in A, B` or
            `KEY > NUMBER`. KEY is another key of the spec, or of the whole run, as `objective.reads_text`.
        unit: unit of the value, such as "s".
        hint: end of the message for a value out of bounds, in place of the default: "0.9 is usual".
        check: function of the full key and the value that raises ConfigError for what no bound says. Not called for
            null.
    """
    metadata = {_RULES: Rules(ge, gt, le, lt, choices, length, When.parse(when), unit, hint, check)}
    if isinstance(default, list | dict):
        made: T = dataclasses.field(default_factory=functools.partial(copy.copy, default), metadata=metadata)
    else:
        made = dataclasses.field(default=default, metadata=metadata)
    return made


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a key, as `option` declares them."""

    ge: float | None
    gt: float | None
    le: float | None
    lt: float | None
    choices: tuple[str, ...]
    length: int | None
    when: When | None
    unit: str
    hint: str
    check: Callable[[str, Any], object] | None

    @property
    def bounds(self) -> str:
        """The bounds as text: `in [0, 1)`, `above 0`, `at least 1`; empty without."""
        ge, gt, le, lt = ("" if bound is None else _number(bound) for bound in (self.ge, self.gt, self.le, self.lt))
        if (ge or gt) and (le or lt):
            return f"in {f'[{ge}' if ge else f'({gt}'}, {f'{le}]' if le else f'{lt})'}"
        words = {"at least": ge, "above": gt, "at most": le, "below": lt}
        return next((f"{word} {bound}" for word, bound in words.items() if bound), "")

    @property
    def expected(self) -> str:
        """The values that the key may have, as text after "must be"; empty if any."""
        bounds = f"{self.bounds} {self.unit}".strip() if self.bounds else ""
        if self.choices:
            number = [f"a whole number {'' if bounds.startswith('in') else 'of '}{bounds}"] if bounds else []
            return any_of([*self.choices, *number])
        if self.length is not None:
            return f"{self.length} numbers {bounds}".strip()
        return bounds

    def accepts(self, value: Any) -> bool:
        """Returns whether a value that is not None is within bounds and choices."""
        if self.choices and isinstance(value, list):
            return all(item in self.choices for item in value)
        if self.choices and value in self.choices:
            return True
        if self.choices:
            return self._is_bounded and value.isdecimal() and self._contains(int(value))
        if isinstance(value, list):
            return self.length in (None, len(value)) and all(map(self._contains, value))
        return self._contains(value)

    @property
    def _is_bounded(self) -> bool:
        return any(bound is not None for bound in (self.ge, self.gt, self.le, self.lt))

    def _contains(self, value: float) -> bool:
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


_NO_RULES = Rules(None, None, None, None, (), None, None, "", "", None)


class Found(NamedTuple):
    """A key that a condition names: its full name, its value, and the group that has it by its kind alone."""

    key: str
    value: Any
    kind: str | None = None
    """Kind of the option whose class has the value, which no key sets."""


Missing = tuple[str, str]
"""A reason for which a condition does not hold, as "with optimizer.non_finite=stop", and what to do."""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a condition: a comparison of a key."""

    key: str
    sign: str  # "": whether it is set; "not": whether it is not
    values: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        """Returns whether the term holds for a value of the key."""
        if self.sign in ("", "not"):
            return (value not in _OFF) == (self.sign == "")
        if self.sign == ">":
            return float(value) > float(self.values[0])
        return (typed(value) in self.values) == (self.sign != "!=")

    def missing(self, found: Found) -> Missing:
        """Returns why the term does not hold."""
        key, value, kind = found
        if kind is not None:
            return f"with {key}={kind}", self._others(key)
        match self.sign:
            case "":
                fix = f"set {key}=true" if value is False else f"give {key}"
            case "not":
                fix = f"remove {key}"
            case ">":
                fix = f"give {key} above {self.values[0]}"
            case "!=" if isinstance(value, enum.Enum):
                fix = f"set {key}={any_of([name for name in type(value).__members__ if name not in self.values])}"
            case "!=":
                fix = f"choose another {key}"
            case _:
                fix = f"set {key}={any_of(self.values)}"
        empty = self.sign == "" and value in _EMPTY
        return f"without {key}" if empty else f"with {key}={typed(value)}", fix

    def _others(self, group: str) -> str:
        """Returns what to choose of a group whose class has the value: the kinds with another one, if they are few."""
        from clipx.config.registry import kinds  # which needs this module

        name = self.key.rpartition(".")[2]
        values = {kind: getattr(cls, name, None) for kind, cls in kinds(group.rpartition(".")[2]).items()}
        fit = [kind for kind, value in values.items() if not isinstance(value, property) and self.holds(value)]
        return f"choose {group}={any_of(fit)}" if 0 < len(fit) <= _FEW else f"choose another {group}"


@dataclass(frozen=True, slots=True)
class When:
    """A condition on other keys: one of several lists of terms, all of which hold."""

    text: str
    alternatives: tuple[tuple[Term, ...], ...]

    @classmethod
    def parse(cls, text: str) -> When | None:
        """Returns the condition that `when` of an option describes; None for none."""
        if not text:
            return None
        return cls(text, tuple(tuple(map(_term, part.split(" and "))) for part in text.split(" or ")))

    @property
    def keys(self) -> list[str]:
        """The keys that it names."""
        return [term.key for terms in self.alternatives for term in terms]

    def missing(self, find: Callable[[str], Found]) -> Missing | None:
        """Returns why the condition does not hold, None if it does. `find` returns a key that it names."""
        missing = dict[Missing, None]()
        for terms in self.alternatives:
            failed = [term.missing(find(term.key)) for term in terms if not term.holds(find(term.key).value)]
            if not failed:
                return None
            missing[failed[0]] = None
        reasons, fixes = (dict.fromkeys(texts) for texts in zip(*missing, strict=True))
        first, *others = reasons
        return " and ".join([first, *(other.removeprefix("with ") for other in others)]), " or ".join(fixes)


def _term(text: str) -> Term:
    found = _TERM.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no term of a condition: see clipx.config.options.option")
    values = tuple(part.strip() for part in (found["value"] or "").split(",") if part)
    return Term(found["key"], found["sign"] or (found["no"] or "").strip(), values)


def any_of(words: Sequence[str]) -> str:
    """Returns words as text: `a, b or c`."""
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _number(bound: float) -> str:
    power = int(bound).bit_length() - 1
    return f"2^{power}" if power > 31 and bound == 2**power else str(bound)


def typed(value: Any) -> str:
    """Returns a value in the form of the command line: `null`, `true`, `[0.9,0.98]`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    return str(value)


# ------------------------------------------------------------------------------------------------------- of a spec


def rules_of(field: dataclasses.Field[Any]) -> Rules | None:
    """Returns the rules of a field; None if it has none."""
    return field.metadata.get(_RULES)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Returns the default of a field of a spec; MISSING if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def usual(default: Any, otherwise: str) -> str:
    """Returns the default of a key as the fix of a message; `otherwise` if it has none."""
    return otherwise if default in (None, MISSING) else f"the default is {typed(default)}"


def facts(field: dataclasses.Field[Any]) -> list[str]:
    """Returns the rules of a field as text, for the help and the reference: bounds, unit, condition."""
    rules = rules_of(field)
    if rules is None:
        return []
    found = [rules.expected or rules.unit, f"only if {rules.when.text}" if rules.when else ""]
    return [text for text in found if text]


places: dict[type, str] = {}
"""Key of the options of each registered class, with a dot: `optimizer.`; empty for a command."""


def check_options(spec: Any, prefix: str, root: Any = None, deferred: bool = False) -> None:
    """Raises ConfigError for a key of a spec that breaks one of its rules.

    Args:
        spec: the spec, with the specs in it. Those that are options of a group were checked when they were made, but
            for conditions on keys of the whole run.
        prefix: of its keys, with a dot.
        root: the run, for conditions on its keys; None for an option of a group, whose run is not made yet.
        deferred: whether to check such conditions alone.
    """
    cls: Any = type(spec)
    for name, optional, rules, default in _ruled(cls):
        value = getattr(spec, name)
        if rules.choices and (isinstance(value, int) or value in ("True", "False")):  # `true` and `2` for a text
            complete(spec, **{name: (value := typed(value).lower())})
        if not deferred and not (value is None and optional):  # a file may have null for another key
            _check_value(f"{prefix}{name}", value, optional, rules, default)
        if rules.when is not None and value != default:
            own = all(_has(spec, key) for key in rules.when.keys)
            known = own or all(_has(spec, key) or _has(root, key) for key in rules.when.keys)  # else with the run
            if known and not (own and deferred):
                missing = rules.when.missing(functools.partial(_find, spec, prefix, root))
                if missing is not None:
                    reason, fix = missing
                    raise without_effect(f"{prefix}{name}={typed(value)}", reason, f"{fix}, or remove it")
    for key, part in _specs_in(spec, prefix):
        registered = type(part) in places
        if root is not None or not registered:
            check_options(part, f"{key}.", root, deferred or registered)


def _check_value(key: str, value: Any, optional: bool, rules: Rules, default: Any) -> None:
    """Checks the bounds and the choices of a key, and what its `check` checks."""
    if optional and value == "":
        raise ConfigError(f"{key}= is empty: give a value, or null")
    if not rules.accepts(value):
        similar = did_you_mean(typed(value).strip("[]"), rules.choices) if rules.choices else ""
        fix = rules.hint or f"{usual(default, 'give one')}{similar}"
        null = ", or null" if optional and not rules.hint else ""
        raise ConfigError(f"{key}={typed(value)} must be {rules.expected}{null}: {fix}")
    if rules.check is not None and value != MISSING:
        rules.check(key, value)


def _find(spec: Any, prefix: str, root: Any, key: str) -> Found:
    """Returns a key that a condition names, of the spec or of the run."""
    own = _has(spec, key)
    full = f"{prefix}{key}" if own else key
    parent, _, name = key.rpartition(".")
    holder = _part(spec if own else root, parent)
    value, kind = getattr(holder, name), getattr(holder, "kind", None)
    if not isinstance(kind, str) or name in (field.name for field in dataclasses.fields(holder)):
        return Found(full, value)
    return Found(full.rpartition(".")[0], value, kind)


def _part(spec: Any, key: str) -> Any:
    """Returns the value of a key below a spec; None if there is none."""
    for name in key.split(".") if key else ():
        spec = getattr(spec, name, None)
    return spec


def _has(spec: Any, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    return hasattr(_part(spec, parent), name)


@functools.cache
def _ruled(cls: Any) -> list[tuple[str, bool, Rules, Any]]:
    """Returns the name, whether it may be null, the rules and the default of each key with rules, and of texts."""
    return [
        (f.name, "None" in str(f.type) or default_of(f) is None, rules_of(f) or _NO_RULES, default_of(f))
        for f in dataclasses.fields(cls)
        if f.name != "kind" and (rules_of(f) is not None or f.type == "str | None")
    ]


@functools.cache
def _holders(cls: Any) -> list[str]:
    """Returns the names of the fields that may hold specs."""
    return [f.name for f in dataclasses.fields(cls) if re.search(r"Spec\b", str(f.type))]


def _specs_in(spec: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields the full key and the value of each spec in a spec: of a field, of a list, and by name."""
    cls: Any = type(spec)
    for name in _holders(cls):
        value = getattr(spec, name)
        if dataclasses.is_dataclass(value):
            yield f"{prefix}{name}", value
        elif isinstance(value, list | dict):
            for key, part in enumerate(value) if isinstance(value, list) else value.items():
                yield f"{prefix}{name}.{key}", part
