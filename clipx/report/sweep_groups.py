"""Groups of the runs of a sweep, which differ in their seed alone, and the roles of the overrides that vary."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from clipx.config.suggestions import did_you_mean
from clipx.errors import require
from clipx.logger import Row
from clipx.report.console import count_of, format_value, is_share
from clipx.report.parallel import numbers_of
from clipx.report.seed_statistics import CurvePoint, Difference, Spread, difference, mean_curve, spread

SEED, RUN = "seed", "run"
NOT_GIVEN = "(not given)"
_CONTENDERS = (RUN, "contender", "objective")  # keys that are the contenders if they vary
_AXIS = "data.batch_size"

Values = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SweepRun:
    """A run of the report. `overrides`: those that not all runs have. `progress`: its state and step in words.

    Only runs of the state `finished` are counted. `values`: the last one of each metric. `seconds`: of training.
    """

    name: str
    overrides: dict[str, str]
    seed: str
    state: str
    progress: str
    command: str
    rows: Sequence[Row]
    events: Sequence[Mapping[str, Any]]
    values: Mapping[str, float]
    step: int | None
    seconds: float
    samples_per_second: float | None

    @property
    def label(self) -> str:
        words = [f"{key}={value}" for key, value in self.overrides.items() if RUN not in self.overrides]
        return " ".join(words) or self.name

    def value(self, key: str) -> str:
        return self.overrides.get(key, NOT_GIVEN)

    @property
    def step_ms(self) -> float | None:
        """Median of (samples of a step) / (samples per second) over the rows with a throughput."""
        rows = [row for row in self.rows if row.get("train/samples_per_second", 0) > 0]
        steps = [(b["samples"] - a["samples"], b["step"] - a["step"], b) for a, b in pairwise(rows)]
        steps = [step for step in steps if step[1] > 0] or [(row["samples"], row["step"], row) for row in rows]
        found = [1e3 * samples / n / row["train/samples_per_second"] for samples, n, row in steps if n]
        return statistics.median(found) if found else None


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of the report: the mean of one or more logged metrics. `lowest`: a low value is a good one.

    `of`: words for the number of samples of each value.
    """

    names: Values
    lowest: bool = False
    of: str = ""

    def counted(self, runs: Iterable[SweepRun]) -> Metric:
        """Returns the metric with the numbers of samples that the runs logged beside it."""
        logged = {run.values.get(count_of(name)) for run in runs for name in self.names if self.share}
        counts = sorted(count for count in logged if count is not None)
        ends = [f"{count:,.0f}" for count in dict.fromkeys(counts[:1] + counts[-1:])]
        return replace(self, of=f" of {' to '.join(ends)}" if ends else "")

    @property
    def label(self) -> str:
        """Name of the metric; of a mean the common parts: `eval/retrieval/recall@1 (mean of 2)`."""
        if len(self.names) == 1:
            return self.names[0]
        parts = [name.split("/") for name in self.names]
        same = [column[0] for column in zip(*parts, strict=False) if len(set(column)) == 1]
        common = "/".join(same) if same and parts[0][-1] in same else " and ".join(self.names)
        return f"{common} (mean of {len(self.names)})"

    @property
    def share(self) -> bool:
        return is_share(self.names[0])

    @property
    def heading(self) -> str:
        return self.label.removeprefix("eval/") + (", %" if self.share else "") + self.of

    def text(self, value: float, sign: bool = False, digits: int | None = None) -> str:
        """Formats a value under its heading: shares in percent, others to 4 significant digits. `sign`: also +."""
        text = format_value("", value) if digits is None else f"{value:,.{digits}f}"
        if self.share:
            text = f"{100 * value:.2f}"
        if not re.search("[1-9]", text):  # no "-0.00"
            return text.lstrip("-")
        return f"+{text}" if sign and value > 0 else text

    def value(self, run: SweepRun) -> float | None:
        """Returns the last value of a run. None if a metric is missing or not finite."""
        found = [run.values.get(name, math.nan) for name in self.names]
        return statistics.fmean(found) if all(map(math.isfinite, found)) else None

    def curve(self, run: SweepRun) -> list[tuple[float, float]]:
        """Returns (samples, value) of each evaluation of a run."""
        rows = [row for row in run.rows if all(name in row for name in self.names)]
        return [(row["samples"], statistics.fmean(row[name] for name in self.names)) for row in rows]


@dataclass(eq=False)
class Group:
    """Runs with the same overrides but for the seed. `all`: in any state. `runs`: those that are counted, by seed."""

    overrides: dict[str, str]
    all: list[SweepRun] = field(default_factory=list)
    runs: dict[str, SweepRun] = field(default_factory=dict)
    _curves: dict[Metric, list[CurvePoint]] = field(default_factory=dict)

    def value(self, key: str) -> str:
        return self.overrides.get(key, NOT_GIVEN)

    def values(self, keys: Iterable[str]) -> Values:
        return tuple(map(self.value, keys))

    def numbers(self, of: Callable[[SweepRun], float | None]) -> dict[str, float]:
        """Returns a number of each counted run that has it, by seed."""
        return {seed: value for seed, run in self.runs.items() if (value := of(run)) is not None}

    def spread(self, of: Callable[[SweepRun], float | None]) -> Spread | None:
        """Returns mean and deviation of a number. None if no run has it."""
        found = self.numbers(of)
        return spread(list(found.values())) if found else None

    def minus(self, other: Group, of: Callable[[SweepRun], float | None]) -> Difference:
        """Returns the difference of a number between the counted runs of both groups."""
        return difference(self.numbers(of), other.numbers(of))

    def curve(self, metric: Metric) -> list[CurvePoint]:
        """Returns the mean curve over seeds of a metric that all counted runs have logged."""
        if metric not in self._curves:  # each comparison of the group asks for it
            self._curves[metric] = mean_curve([metric.curve(run) for run in self.runs.values()])
        return self._curves[metric]


def group_runs(runs: Sequence[SweepRun], metric: Metric) -> tuple[list[Group], list[tuple[SweepRun, str]]]:
    """Returns the groups, sorted by their overrides, and the runs that they do not count with the reasons."""
    groups: dict[frozenset[tuple[str, str]], Group] = {}
    left_out = []
    for run in runs:
        overrides = {key: value for key, value in run.overrides.items() if key != SEED}
        group = groups.setdefault(frozenset(overrides.items()), Group(overrides))
        group.all.append(run)
        if run.state != "finished":
            left_out.append((run, run.progress))
        elif metric.value(run) is None:
            left_out.append((run, f"has no finite value of {metric.label}"))
        elif run.seed in group.runs:
            left_out.append((run, f"has the overrides and the seed of {group.runs[run.seed].name}"))
        else:
            group.runs[run.seed] = run
    why = f"none of {len(runs)} runs has finished with a value of {metric.label}: clipx-sweep status shows their states"
    require(len(left_out) < len(runs), why)
    found = list(groups.values())
    return _sorted(found, _varied(found)), left_out


class SweepLayout:
    """Roles of the overrides that vary between groups.

    `by`: their values are the contenders, each with a colour. `x`: numeric, the horizontal axis. `tied`: have one value
    for each contender and value of `x`, and are regarded as part of them. Groups are compared only where `cell_keys`
    are equal; `curve_keys` and `panel_keys` separate the charts against samples and against x.
    """

    def __init__(self, groups: Sequence[Group], by: Values, x: str | None, baseline: Mapping[str, str] | None) -> None:
        self.groups, self.by, self.x, self.keys = groups, by, x, _varied(groups)
        chosen = (*by, *([x] if x else []))
        self.tied = tuple(k for k in self.keys if k not in chosen and _is_function(groups, k, chosen))
        if baseline is None:  # the first contender, or the first value of x
            first = _sorted(groups, by or chosen)[0]
            baseline = {key: first.value(key) for key in by or chosen}
        self.baseline = dict(baseline)
        self.curve_keys = tuple(key for key in self.keys if key not in (*by, *self.tied))
        self.panel_keys = tuple(key for key in self.curve_keys if key != x)
        self.cell_keys = tuple(key for key in self.keys if key not in (*self.baseline, *self.tied))
        self._contenders = list(dict.fromkeys(group.values(by) for group in _sorted(groups, by)))
        self.names = [", ".join(values) or "all" for values in self._contenders]
        self.x_values = {} if x is None else numbers_of(_ordered([group for group in groups if group.runs], x)) or {}

    def contender(self, group: Group) -> int:
        """Returns the number of a group's contender, which chooses its colour."""
        return self._contenders.index(group.values(self.by))

    def name(self, group: Group) -> str:
        """Returns the name of a group in its cell."""
        return ", ".join(group.values(self.baseline)) or "all"

    def is_baseline(self, group: Group) -> bool:
        return group.values(self.baseline) == tuple(self.baseline.values())

    def cells(self, keys: Values) -> dict[str, list[Group]]:
        """Returns the groups by their values of `keys`: `data.batch_size=16 data.mismatched=0`."""
        found: dict[str, list[Group]] = {}
        for group in _sorted(self.groups, (*keys, *self.by)):
            label = " ".join(f"{key}={group.value(key)}" for key in keys)
            found.setdefault(label, []).append(group)
        return found


def choose(groups: Sequence[Group], by: str | None, x: str | None, baseline: str | None) -> SweepLayout:
    """Returns the layout for the options of the command. None chooses by what varies. Raises ConfigError."""
    keys = _varied(groups)
    chosen = None if by is None else _known(keys, "by", by.split(","))
    if x is not None:
        _known(keys, "x", [x])
        require(x not in (chosen or ()), f"--x={x} is also in --by={by}: choose another key for one of them")
        words = " and ".join(text for text in _ordered(groups, x) if numbers_of([text]) is None)
        require(not words, f"--x={x} must be a number for all points, and is {words}: choose another key")
    if chosen is None:
        free = [key for key in keys if key != x]
        texts = [k for k in free if numbers_of([v for v in _ordered(groups, k) if v != NOT_GIVEN]) is None]
        chosen = tuple([key for key in _CONTENDERS if key in free] or texts)[:1]
    if x is None:
        free = [key for key in keys if key not in chosen and numbers_of(_ordered(groups, key)) is not None]
        free = [key for key in free if not chosen or not _is_function(groups, key, chosen)]
        x = _AXIS if _AXIS in free else next(iter(free), None)
    if by is None and x is None and not chosen:
        chosen = tuple(keys[:1])  # numbers that some points do not have
    return SweepLayout(groups, chosen, x, None if baseline is None else _baseline(groups, keys, baseline))


def _baseline(groups: Sequence[Group], keys: Sequence[str], asked: str) -> dict[str, str]:
    """Returns the overrides of the baseline that is asked for."""
    pairs = [text.partition("=") for text in re.split(r",(?=[^,=\]}]+=)", asked)]
    for key, equals, value in pairs:
        require(bool(equals), f"--baseline={asked} is not KEY=VALUE[,KEY=VALUE…]: name overrides, as objective=infonce")
        _known(keys, "baseline", [key])
        known = _ordered(groups, key)
        fix = f"give one of {', '.join(known)}{did_you_mean(value, known)}"
        require(value in known, f"--baseline={asked}: no point has {key}={value}: {fix}")
    return {key: value for key, _, value in pairs}


def _known(keys: Sequence[str], option: str, asked: Sequence[str]) -> Values:
    for key in asked:
        fix = f"give one of {', '.join(keys)}{did_you_mean(key, keys)}" if keys else "only the seed varies: remove it"
        require(key in keys, f"--{option}={key} does not vary between groups of points: {fix}")
    return tuple(dict.fromkeys(asked))


def _is_function(groups: Sequence[Group], key: str, of: Values) -> bool:
    """Returns whether groups with the same values of the keys `of` have the same value of `key`."""
    return len({group.values((*of, key)) for group in groups}) == len({group.values(of) for group in groups})


def _varied(groups: Sequence[Group]) -> list[str]:
    """Returns the keys whose values differ between groups, in the order of the overrides."""
    keys = dict.fromkeys(key for group in groups for key in group.overrides)
    return [key for key in keys if len({group.value(key) for group in groups}) > 1]


def _ordered(groups: Sequence[Group], key: str) -> list[str]:
    """Returns the values of a key: numbers in ascending order, texts in the order of the points."""
    values = list(dict.fromkeys(group.value(key) for group in groups))
    numbers = numbers_of(values)
    return values if numbers is None else sorted(values, key=numbers.__getitem__)


def _sorted(groups: Sequence[Group], keys: Iterable[str]) -> list[Group]:
    """Returns the groups sorted by the values of keys, those of the first key first."""
    ranks = {key: {value: rank for rank, value in enumerate(_ordered(groups, key))} for key in keys}
    return sorted(groups, key=lambda group: [ranks[key][group.value(key)] for key in ranks])
