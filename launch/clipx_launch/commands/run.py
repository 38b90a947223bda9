"""A run read from its folder, and the metrics by which runs are compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from clipx.config.duration import Duration, Length
from clipx.config.safe_yaml import read_saved
from clipx.config.suggestions import did_you_mean
from clipx.errors import ConfigError
from clipx.logger import Row
from clipx.report.console import format_score, is_headline
from clipx.report.run_history import History
from clipx.trainer.spec import parse_duration
from clipx_launch.files import Launch
from clipx_launch.point import Point, Result

_MOST = 2**53  # samples, of which float64 represents all integers


class State(StrEnum):
    """State of a run."""

    waiting = "waiting"  # in SLURM's queue, or in the queue of clipx_local
    starting = "starting"  # running, without a line of metrics
    running = "running"  # running, with metrics
    silent = "silent"  # running, but has written nothing for ten minutes
    requeued = "requeued"  # saved before its time limit, and in the queue again
    finished = "finished"
    pruned = "pruned"  # ended early by a sweeper, with its last evaluation, checkpoint and report
    failed = "failed"
    cancelled = "cancelled"  # by scancel, SIGTERM or SIGINT; a running point has saved
    preempted = "preempted"  # ended by SLURM for another job, and not requeued
    stopped = "stopped"  # saved before its time limit, and not requeued
    lost = "lost"  # its job or process is gone and left no result


RESUMABLE = frozenset({State.failed, State.cancelled, State.preempted, State.stopped, State.lost})
ENDED = RESUMABLE | {State.finished, State.pruned}


class SavedStep(NamedTuple):
    """Complete checkpoint of a run, and when it was written, in seconds since 1970."""

    folder: Path
    step: int
    time: float


class MetricValue(NamedTuple):
    """Value of a metric and the step at which it was logged."""

    value: float
    step: int


@dataclass
class RunFiles:
    """Files and state of one run. `name` is its folder, relative to the folder that was searched if it is one."""

    folder: Path
    name: str
    point: Point | None
    sweep: Path | None  # folder of the sweep that the point is of
    launch: Launch | None  # of the point, from sweep.json
    rows: list[Row] = field(repr=False)
    events: list[dict[str, Any]] = field(repr=False)
    result: Result | None  # of the point
    checkpoints: list[SavedStep]  # the newest first
    damaged: list[str]  # what could not be read, a line for each file
    state: State = State.starting
    reason: str = ""  # reason of the state, one line
    varied: dict[str, str] = field(default_factory=dict)  # overrides that not all runs have, by key

    @property
    def job(self) -> str | None:
        return None if self.point is None else self.point.job_id

    @cached_property
    def last(self) -> Row:
        """Newest row with a loss. Empty if there is none."""
        return next((row for row in reversed(self.rows) if "train/loss" in row), {})

    @cached_property
    def newest(self) -> dict[str, MetricValue]:
        """Last value of each metric, in the order in which the metrics were first logged."""
        return {name: MetricValue(row[name], int(row["step"])) for row in self.rows for name in row if "/" in name}

    @cached_property
    def best(self) -> dict[str, MetricValue]:
        """Highest value of each headline metric."""
        found: dict[str, MetricValue] = {}
        for row in self.rows:
            for name in filter(is_headline, row):
                if name not in found or row[name] > found[name].value:
                    found[name] = MetricValue(row[name], int(row["step"]))
        return found

    def score(self, metric: str) -> str:
        """Formats the last value of a metric, a share with the number of its samples."""
        return format_score(metric, {name: number.value for name, number in self.newest.items()})

    @property
    def steps(self) -> int | None:
        """Number of steps of the whole run. None if unknown: samples per epoch are counted when the data is opened."""
        row = self.rows[-1] if self.rows else {}
        try:
            duration, batch = _length(self.folder / "config.yaml")
            epoch = round(row["samples"] / row["epoch"]) if duration.unit == "ep" else 0
            steps = duration.samples(Length(epoch, batch)) // batch
        except (ConfigError, KeyError, TypeError, ValueError, ArithmeticError):  # not started, damaged, another version
            return None
        return steps if steps < _MOST else None

    @property
    def samples_per_second(self) -> float | None:
        """Median over the rows of the run."""
        rates = [row["train/samples_per_second"] for row in self.rows if "train/samples_per_second" in row]
        return statistics.median(rates) if rates else None

    @property
    def seconds(self) -> float:
        """Seconds that the run was active, over all its starts, without the time between them."""
        return History(self.rows, self.events).seconds


@cache
def _length(config: Path) -> tuple[Duration, int]:
    """Returns the duration of a run and its batch size. Raises an error for values of other types."""
    values = read_saved(config)
    duration, batch = values["duration"], values["data"]["batch_size"]
    if not isinstance(duration, str) or type(batch) is not int or not 0 < batch < _MOST:
        raise TypeError
    return parse_duration(duration), batch


def metric_of(runs: Collection[RunFiles], asked: str | None) -> str:
    """Returns the metric to compare runs by: `asked`, by default the first headline metric, else the loss.

    Raises ConfigError if no run has logged `asked`.
    """
    names = list({name: None for run in runs for name in run.newest})
    if asked is None:
        return next(filter(is_headline, names), "train/loss")
    found = next((name for name in (asked, f"eval/{asked}") if name in names), None)
    if found is None:
        shown = [name for name in names if name.startswith("eval/")] or names
        fix = f"give one of {', '.join(shown)}{did_you_mean(asked, names)}" if names else "no run has metrics yet"
        raise ConfigError(f"metric={asked} is not a metric of these runs: {fix}")
    return found


def value_of(run: RunFiles, metric: str) -> MetricValue | None:
    """Returns the newest value of a metric. None if there is none, or if it is not finite."""
    number = run.newest.get(metric)
    return number if number is not None and math.isfinite(number.value) else None
