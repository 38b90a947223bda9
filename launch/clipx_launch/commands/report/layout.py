"""Layout of the report: which overrides are the contenders, the horizontal axis, the baseline, and the cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from clipx.config.messages import did_you_mean
from clipx.errors import ConfigError, require
from clipx_launch.commands.report.groups import NOT_GIVEN, Group, keys_of, numbers_of, ordered

_CONTENDERS = ("contender", "objective")  # keys that are the contenders if they vary
_AXIS = "data.batch_size"

Values = tuple[str, ...]


@dataclass(eq=False)
class Layout:
    """Roles of the overrides that vary between groups.

    `by`: their values are the contenders, each with a colour. `x`: numeric, the horizontal axis. `tied`: have one value
    for each contender and value of `x`, and are regarded as part of them. The others separate the cells in which
    contenders are compared.
    """

    groups: list[Group]
    by: Values
    x: str | None
    baseline: dict[str, str] = field(default_factory=dict)

    @cached_property
    def keys(self) -> list[str]:
        return keys_of(self.groups)

    @cached_property
    def tied(self) -> Values:
        chosen = (*self.by, *([self.x] if self.x else []))
        others = [key for key in self.keys if key not in chosen]
        return tuple(key for key in others if _is_function(self.groups, key, chosen))

    @cached_property
    def cell_keys(self) -> Values:
        """Keys that separate panels with x as the horizontal axis."""
        return tuple(key for key in self.keys if key not in (*self.by, *self.tied, self.x))

    @cached_property
    def curve_keys(self) -> Values:
        """Keys that separate panels of curves."""
        return tuple(key for key in self.keys if key not in (*self.by, *self.tied))

    @cached_property
    def compared_keys(self) -> Values:
        """Keys whose values are compared with each other: those of the baseline."""
        return tuple(self.baseline)

    @cached_property
    def comparison_keys(self) -> Values:
        """Keys that separate the cells of comparisons: groups are compared only where these are equal."""
        return tuple(key for key in self.keys if key not in (*self.compared_keys, *self.tied))

    @cached_property
    def contenders(self) -> list[Values]:
        """Values of `by`, in their order. One empty tuple if there are no contenders."""
        return list(dict.fromkeys(group.values(self.by) for group in _sorted(self.groups, self.by)))

    @cached_property
    def x_values(self) -> dict[str, float]:
        """Numbers of the horizontal axis by their texts."""
        return {} if self.x is None else numbers_of(ordered(self.groups, self.x)) or {}

    def contender(self, group: Group) -> int:
        """Returns the number of a group's contender, which chooses its colour."""
        return self.contenders.index(group.values(self.by))

    def cells(self, keys: Values) -> dict[Values, list[Group]]:
        """Returns the groups by their values of `keys`."""
        found: dict[Values, list[Group]] = {}
        for group in _sorted(self.groups, keys):
            found.setdefault(group.values(keys), []).append(group)
        return {cell: _sorted(groups, self.by) for cell, groups in found.items()}

    def baseline_of(self, group: Group) -> Group | None:
        """Returns the baseline in the cell of a group, None if there is none with a finished run."""
        cell = group.values(self.comparison_keys)
        wanted = tuple(self.baseline.values())
        same = [other for other in self.groups if other.values(self.comparison_keys) == cell and other.runs]
        return next((other for other in same if other.values(self.compared_keys) == wanted), None)


def label(keys: Iterable[str], values: Iterable[str]) -> str:
    """Returns the name of a cell: `data.batch_size=16 data.mismatched=0`. Empty if there is only one."""
    return " ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))


def contender_name(values: Values) -> str:
    return ", ".join(values) or "all"


def choose(groups: Sequence[Group], by: str | None, x: str | None, baseline: str | None) -> Layout:
    """Returns the layout for the options of the command; None chooses by the sweep. Raises ConfigError."""
    keys = keys_of(groups)
    chosen_by = _chosen(keys, "by", by.split(",")) if by is not None else None
    chosen_x = _chosen(keys, "x", [x])[0] if x is not None else None
    if chosen_x is not None:
        require(chosen_x not in (chosen_by or ()), f"--x={x} is also in --by={by}: choose another key for one of them")
        lacking = [text for text in ordered(groups, chosen_x) if numbers_of([text]) is None]
        require(
            not lacking, f"--x={x} must be a number for all points, and is {' and '.join(lacking)}: choose another key"
        )
    if chosen_by is None:
        chosen_by = _default_by([key for key in keys if key != chosen_x], groups)
    if chosen_x is None:
        chosen_x = _default_x(keys, chosen_by, groups)
    if by is None and chosen_x is None and not chosen_by:
        chosen_by = tuple(keys[:1])  # numbers that some points do not have
    layout = Layout(list(groups), chosen_by, chosen_x)
    layout.baseline = _baseline(layout, baseline)
    return layout


def _chosen(keys: Sequence[str], option: str, asked: Sequence[str]) -> Values:
    for key in asked:
        known = f"give one of {', '.join(keys)}{did_you_mean(key, keys)}" if keys else "only the seed varies: remove it"
        require(key in keys, f"--{option}={key} does not vary between groups of points: {known}")
    return tuple(dict.fromkeys(asked))


def _default_by(keys: Sequence[str], groups: Sequence[Group]) -> Values:
    known = [key for key in _CONTENDERS if key in keys]
    texts = [key for key in keys if numbers_of([v for v in ordered(groups, key) if v != NOT_GIVEN]) is None]
    return tuple((known or texts)[:1])


def _default_x(keys: Sequence[str], by: Values, groups: Sequence[Group]) -> str | None:
    free = [key for key in keys if key not in by and numbers_of(ordered(groups, key)) is not None]
    free = [key for key in free if not by or not _is_function(groups, key, by)]
    return _AXIS if _AXIS in free else next(iter(free), None)


def _baseline(layout: Layout, asked: str | None) -> dict[str, str]:
    """Returns the overrides of the baseline; by default the first contender, or the first value of x."""
    if asked is None:
        keys = layout.by or ((layout.x,) if layout.x else ())
        first = _sorted(layout.groups, keys)[0]
        return dict(zip(keys, first.values(keys), strict=True))
    pairs = [text.partition("=") for text in re.split(r",(?=[^,=\]}]+=)", asked)]
    for key, equals, value in pairs:
        require(bool(equals), f"--baseline={asked} is not KEY=VALUE[,KEY=VALUE…]: name overrides, as objective=infonce")
        _chosen(layout.keys, "baseline", [key])
        values = ordered(layout.groups, key)
        if value not in values:
            shown = f"give one of {', '.join(values)}{did_you_mean(value, values)}"
            raise ConfigError(f"--baseline={asked}: no point has {key}={value}: {shown}")
    return {key: value for key, _, value in pairs}


def _is_function(groups: Sequence[Group], key: str, of: Values) -> bool:
    """Returns whether groups with the same values of the keys `of` have the same value of `key`."""
    found: dict[Values, str] = {}
    return all(found.setdefault(group.values(of), group.value(key)) == group.value(key) for group in groups)


def _sorted(groups: Sequence[Group], keys: Values) -> list[Group]:
    ranks: dict[str, Mapping[str, int]] = {
        key: {value: rank for rank, value in enumerate(ordered(groups, key))} for key in keys
    }
    return sorted(groups, key=lambda group: [ranks[key][group.value(key)] for key in keys])
