"""History of a run from the lines of events.jsonl and metrics.jsonl: its starts, events on the curves, time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np

from clipx.logger import Row

Event = Mapping[str, Any]
"""Line of events.jsonl: `time`, `event`, and further facts."""

FINISHED = "finished"
"""Reason of the end of a start that trained to the end of the run."""

NOTES = frozenset({"checkpoint_left", "requeued", "retried"})
"""Kinds of events whose message is a fact. The messages of the others are warnings."""

PACKAGES = ("clipx", "torch", "timm", "python")
"""Packages whose versions the starts of a run record."""

_MOST_MARKS = 60
_LATEST = 2e11  # seconds since 1970 that datetime can represent
_MOST = 2**53  # samples and steps: float64 represents all integers up to here
_LARGEST = 1e100  # finite value of a metric, whose square and sums are finite too
_LONGEST = 250  # characters of the name of a metric
_PLACE = {"step": _MOST, "samples": _MOST, "epoch": _MOST, "seconds": _LATEST}  # numbers that each row has


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the run: its `start` event, and the seconds since 1970 and the reason of its end."""

    event: Event
    end: float
    reason: str

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last line of the run before the next start."""
        return max(0.0, self.end - float(self.event["time"]))

    @property
    def versions(self) -> str:
        """Versions of clipx, torch, timm and Python, as recorded."""
        return ", ".join(f"{name} {self.event[name]}" for name in PACKAGES if name in self.event)


class History:
    """Starts and events of a run. `rows`: of metrics.jsonl. `events`: of events.jsonl; damaged ones are omitted."""

    def __init__(self, rows: Sequence[Row], events: Sequence[Event]) -> None:
        self.events = list(filter(is_event, events))
        self.rows = sorted(filter(is_row, rows), key=lambda row: row["samples"])

    @cached_property
    def starts(self) -> list[Start]:
        """Starts in their order. Empty without events."""
        known = self.events
        begun = [i for i, event in enumerate(known) if event["event"] == "start"]
        marks = sorted([*(row["seconds"] for row in self.rows), *(event["time"] for event in known)])
        found = []
        for i, after in zip(begun, [*begun[1:], len(known)], strict=False):
            until = known[after]["time"] if after < len(known) else np.inf
            last = max((mark for mark in marks if mark < until), default=known[i]["time"])
            found.append(Start(known[i], last, _reason(known[i:after], after == len(known))))
        return found

    @property
    def seconds(self) -> float:
        """Seconds of all starts, without the time between them."""
        return sum(start.seconds for start in self.starts)

    def axes(self, most: int) -> dict[str, list[float]]:
        """Returns samples, steps, epochs and seconds of training, ascending, at no more than about `most` rows."""
        rows = self.rows[:: max(1, len(self.rows) // most)] + self.rows[-1:]
        places = {row["samples"]: row for row in rows}  # the last of those after the same samples
        found: list[Row] = list(places.values())
        if not found or found[0]["samples"] > 0:
            begin = self.starts[0].event["time"] if self.starts else 0.0
            found.insert(0, {"samples": 0.0, "step": 0.0, "epoch": 0.0, "seconds": begin})
        columns = {name: [row[name] for row in found] for name in ("samples", "step", "epoch")}
        if self.starts:
            times = [self._trained(row["seconds"]) for row in found]
            columns["seconds"] = np.maximum.accumulate(times).tolist()
        return columns

    def _trained(self, now: float) -> float:
        """Returns the seconds of training until a time, without the time between the starts."""
        return sum(min(max(now - float(start.event["time"]), 0.0), start.seconds) for start in self.starts)

    def marks(self) -> list[tuple[float, str]]:
        """Returns (samples, text) of resumes, stops, warnings and notes, for the curves."""
        if not self.rows:
            return []
        found = [(event, words) for event in self.events if (words := _words(event))]
        found = found[:: max(1, -(-len(found) // _MOST_MARKS))]
        return [(self._samples_at(event), words) for event, words in found]

    def _samples_at(self, event: Event) -> float:
        """Returns the samples seen at an event by its step, else by its time."""
        if "step" in event:
            steps = [0.0, *(row["step"] for row in self.rows)]
            return float(np.interp(event["step"], steps, [0.0, *(row["samples"] for row in self.rows)]))
        rows = sorted(self.rows, key=lambda row: row["seconds"])
        return float(np.interp(event["time"], [r["seconds"] for r in rows], [r["samples"] for r in rows]))


def is_event(event: Event) -> bool:
    """Returns whether an event has a kind, a time, and a step and a signal of their types if it has them."""
    texts = event.get("event"), event.get("signal", "")
    numbers = _is_within(event.get("time"), _LATEST) and _is_within(event.get("step", 0), _MOST)
    return numbers and all(isinstance(text, str) for text in texts)


def is_row(row: Row) -> bool:
    """Returns whether a row has step, samples, epoch and seconds, and numbers under names of metrics."""
    return (
        all(_is_within(row.get(name), most) for name, most in _PLACE.items())
        and all(type(value) in (int, float) and not _LARGEST <= abs(value) < math.inf for value in row.values())
        and all(len(name) <= _LONGEST and name.isprintable() for name in row)
    )


def _is_within(number: Any, most: float) -> bool:
    return type(number) in (int, float) and 0 <= number < most


def _reason(events: Sequence[Event], last: bool) -> str:
    """Returns how a start ended. The report of a run that finishes is written before its last start ends."""
    ends = [event for event in events if event["event"] in ("stopped", "failed", "end")]
    if ends and ends[-1]["event"] != "end":
        return _words(ends[-1])
    return FINISHED if ends or last else "ended without a record"


def _words(event: Event) -> str:
    """Returns the text of an event on the curves. Empty for events that are not shown."""
    kind, step = event.get("event"), event.get("step")
    if kind == "start" and step:
        return f"resumed at step {step:,}, {date(event['time'])}"
    if kind == "stopped":
        return f"stopped by {event.get('signal', 'a signal')} at step {step or 0:,}"
    if kind == "failed":
        return f"failed after step {step or 0:,}: {event.get('message', 'unknown')!s:.600}"
    return f"{kind}: {event['message'][:160]}" if isinstance(event.get("message"), str) else ""


def date(seconds: float) -> str:
    """Formats seconds since 1970 as a date and time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
