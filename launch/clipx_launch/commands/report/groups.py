"""Groups of a sweep's points: those with the same overrides but for the seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from clipx.errors import ConfigError, require
from clipx.report.console import is_headline, is_share
from clipx.report.seed_statistics import CurvePoint, Spread, mean_curve, spread
from clipx_launch.commands.parallel_coordinates import parse_numbers
from clipx_launch.commands.run import Run, State, metric_of, value_of

SEED = "seed"
NOT_GIVEN = "(not given)"
_OTHER_WAY = ("/image_to_text/", "/text_to_image/")  # directions of retrieval: the default metric is their mean


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of the report: the mean of one or more logged metrics."""

    names: tuple[str, ...]
    lowest: bool  # a low value is a good one

    @property
    def label(self) -> str:
        """Name of the metric; of a mean the common parts: `eval/retrieval/recall@1 (mean of 2)`."""
        if len(self.names) == 1:
            return self.names[0]
        parts = [name.split("/") for name in self.names]
        same = [column[0] for column in zip(*parts, strict=False) if len(set(column)) == 1]
        common = "/".join(same) if same and parts[0][-1] in same else " and ".join(self.names)
        return f"{common} (mean of {len(self.names)})"

    def value(self, run: Run) -> float | None:
        """Returns the last value of a run. None if a metric is missing or not finite."""
        numbers = [value_of(run, name) for name in self.names]
        found = [number.value for number in numbers if number is not None]
        return statistics.fmean(found) if len(found) == len(numbers) else None

    def curve(self, run: Run) -> list[tuple[float, float]]:
        """Returns (samples, value) of each evaluation of a run."""
        rows = [row for row in run.rows if all(name in row for name in self.names)]
        return [(row["samples"], statistics.fmean(row[name] for name in self.names)) for row in rows]


@dataclass(slots=True)
class LeftOut:
    """A point that no group counts, and the reason."""

    run: Run
    reason: str


@dataclass(eq=False)
class Group:
    """Points with the same varied overrides but for the seed. `runs`: the finished ones by seed."""

    overrides: dict[str, str]
    points: int = 0  # of all states
    runs: dict[str, Run] = field(default_factory=dict)

    def value(self, key: str) -> str:
        return self.overrides.get(key, NOT_GIVEN)

    def values(self, keys: Iterable[str]) -> tuple[str, ...]:
        return tuple(self.value(key) for key in keys)

    def numbers(self, metric: Metric) -> dict[str, float]:
        """Returns the metric of each counted run by seed."""
        found = {seed: metric.value(run) for seed, run in self.runs.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def spread(self, metric: Metric) -> Spread | None:
        values = list(self.numbers(metric).values())
        return spread(values) if values else None

    def curve(self, metric: Metric) -> list[CurvePoint]:
        """Returns the mean curve over seeds of a metric that all counted runs have logged."""
        return mean_curve([metric.curve(run) for run in self.runs.values()])

    @cached_property
    def step_ms(self) -> Spread | None:
        """Milliseconds of a step: the median over the rows of each run."""
        found = [value for run in self.runs.values() if (value := _step_ms(run)) is not None]
        return spread(found) if found else None

    @cached_property
    def samples_per_second(self) -> Spread | None:
        """Samples per second: the median over the rows of each run."""
        found = [run.samples_per_second for run in self.runs.values() if run.samples_per_second is not None]
        return spread(found) if found else None


def _step_ms(run: Run) -> float | None:
    """Returns the median of (samples of a step) / (samples per second) over the rows with a throughput."""
    rows = [row for row in run.rows if row.get("train/samples_per_second", 0) > 0]
    pairs = [(a, b) for a, b in pairwise(rows) if b["step"] > a["step"]]
    found = [
        1e3 * (b["samples"] - a["samples"]) / (b["step"] - a["step"]) / b["train/samples_per_second"] for a, b in pairs
    ]
    if not found:
        found = [1e3 * row["samples"] / row["step"] / row["train/samples_per_second"] for row in rows if row["step"]]
    return statistics.median(found) if found else None


def metric_named(runs: Sequence[Run], asked: str | None, lowest: bool) -> Metric:
    """Returns the metric that `asked` names, several names separated by commas. Raises ConfigError.

    The default is the first headline metric; for a direction of retrieval the mean of both directions.
    """
    if asked is not None:
        names = tuple(dict.fromkeys(metric_of(runs, name) for name in asked.split(",")))
    else:
        first = metric_of(runs, None)
        logged = {name for run in runs for name in run.newest}
        both = [first.replace(way, other) for way in _OTHER_WAY for other in _OTHER_WAY if way in first]
        names = tuple(name for name in both if name in logged) or (first,)
    losses = [name.endswith("loss") for name in names]
    alike = len(set(losses)) == 1 and len(set(map(is_share, names))) == 1
    require(alike, f"--metric={asked} mixes losses, shares or other numbers, which have no mean: give one kind")
    return Metric(names, lowest or losses[0])


def headline_metrics(runs: Sequence[Run], metric: Metric, most: int = 4) -> list[Metric]:
    """Returns the metrics of the table: the report's, its parts, and up to `most` further headline metrics."""
    logged = dict.fromkeys(name for run in runs for name in run.newest if is_headline(name))
    parts = list(metric.names) if len(metric.names) > 1 else []
    more = [name for name in logged if name not in metric.names][:most]
    return [metric, *(Metric((name,), metric.lowest if name in parts else False) for name in (*parts, *more))]


def group_points(runs: Sequence[Run], metric: Metric) -> tuple[list[Group], list[LeftOut]]:
    """Returns the groups, sorted by their overrides, and the points that they do not count."""
    groups: dict[frozenset[tuple[str, str]], Group] = {}
    left_out = []
    for run in runs:
        overrides = {key: value for key, value in run.varied.items() if key != SEED}
        group = groups.setdefault(frozenset(overrides.items()), Group(overrides))
        group.points += 1
        seed, value = seed_of(run), metric.value(run)
        if run.state is not State.finished:
            left_out.append(LeftOut(run, _progress(run)))
        elif value is None:
            left_out.append(LeftOut(run, f"has no finite value of {metric.label}"))
        elif seed in group.runs:
            left_out.append(LeftOut(run, f"has the overrides and the seed of {group.runs[seed].name}"))
        else:
            group.runs[seed] = run
    if not any(group.runs for group in groups.values()):
        raise ConfigError(
            f"none of the {len(runs)} points has finished with a value of {metric.label}: clipx-sweep status shows "
            "their states"
        )
    return sort_groups(list(groups.values())), left_out


def seed_of(run: Run) -> str:
    """Returns the seed of a point, as in its last override of it."""
    typed = run.point.overrides if run.point else []
    given = [text.partition("=")[2] for text in typed if text.lstrip("+").startswith(f"{SEED}=")]
    return given[-1] if given else NOT_GIVEN


def _progress(run: Run) -> str:
    """Returns the state of a point and its step; for a failure also the error. Reasons of other states name hosts."""
    of = f" of {run.steps:,}" if run.steps else ""
    step = f" at step {run.last['step']:,.0f}{of}" if run.last else ""
    return f"{run.state.value}{step}" + (f": {run.reason}" if run.state is State.failed and run.reason else "")


def sort_groups(groups: Sequence[Group]) -> list[Group]:
    """Sorts groups by the values of their keys, those of the first key first."""
    ranks = {key: {v: i for i, v in enumerate(ordered(groups, key))} for key in keys_of(groups)}
    return sorted(groups, key=lambda group: [ranks[key][group.value(key)] for key in ranks])


def keys_of(groups: Sequence[Group]) -> list[str]:
    """Returns the keys whose values differ between groups, in the order of the overrides."""
    keys = dict.fromkeys(key for group in groups for key in group.overrides)
    return [key for key in keys if len({group.value(key) for group in groups}) > 1]


def ordered(groups: Sequence[Group], key: str) -> list[str]:
    """Returns the values of a key: numbers in ascending order, texts in the order of the points."""
    values = list(dict.fromkeys(group.value(key) for group in groups))
    numbers = numbers_of(values)
    return values if numbers is None else sorted(values, key=numbers.__getitem__)


def numbers_of(values: Sequence[str]) -> dict[str, float] | None:
    """Returns the numbers that texts represent. None if one of them is not a finite number."""
    parsed = parse_numbers(values)
    numbers = {text: float(value) for text, value in zip(values, parsed, strict=True) if isinstance(value, int | float)}
    complete = len(numbers) == len(values) and all(map(math.isfinite, numbers.values()))
    return numbers if complete else None


def overrides_text(overrides: Mapping[str, str]) -> str:
    """Returns overrides as typed: `data.batch_size=16 data.mismatched=0`."""
    return " ".join(f"{key}={value}" for key, value in overrides.items())
