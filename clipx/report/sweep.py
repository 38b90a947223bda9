"""Report of a sweep, or of several runs: a JSON document of numbers, and a page that shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import combinations
from operator import attrgetter
from typing import Any

from clipx.report.console import format_clock, is_headline
from clipx.report.page import Cell, command, details, page, paragraph, section, table
from clipx.report.parallel import numbers_of
from clipx.report.run_history import PACKAGES
from clipx.report.seed_statistics import Spread, samples_to_reach
from clipx.report.sweep_charts import mean_curves, metric_by_x, run_charts
from clipx.report.sweep_groups import RUN, SEED, Group, Metric, SweepRun, choose, group_runs

_MARKED = 2.0  # differences of more than 2 pooled deviations are bold
_MOST_METRICS = 4  # further metrics of the tables
_NONE, _PLAIN = Cell("–"), Metric(("value",))

_STEP_MS = attrgetter("step_ms")
_RATE = attrgetter("samples_per_second")

Numbers = dict[str, Any]
"""Part of the document."""
Row = Sequence[Cell | str]


class SweepReport:
    """Numbers and page of runs. `commands`: those that launched them. `by`, `x`, `baseline`: options of the command."""

    def __init__(
        self, title: str, commands: Sequence[str], runs: Sequence[SweepRun], metric: Metric, by: str | None = None,
        x: str | None = None, baseline: str | None = None,
    ) -> None:  # fmt: skip
        metric = metric.counted(runs)
        self._title, self._commands, self._runs, self._metric = title, commands, runs, metric
        groups, self._left_out = group_runs(runs, metric)
        self._layout = choose(groups, by, x, baseline)
        parts = metric.names if len(metric.names) > 1 else ()
        logged = dict.fromkeys(name for run in runs for name in run.values if is_headline(name))
        more = [name for name in logged if name not in metric.names][:_MOST_METRICS]
        others = (Metric((name,), metric.lowest and name in parts) for name in (*parts, *more))
        self._metrics = [metric, *(other.counted(runs) for other in others)]
        self._keys = sorted({key: None for run in runs for key in run.overrides}, key=lambda key: key == SEED)
        self.counted = f"{len(runs) - len(self._left_out)} of {len(runs)} runs in {len(groups)} groups"
        self._pairs: list[tuple[Group, Group]] = []
        self._based: list[tuple[Group, Group]] = []  # each group and its baseline
        self._best: set[Group] = set()
        for cell in self._layout.cells(self._layout.cell_keys).values():
            counted = [group for group in cell if group.runs]
            self._pairs += combinations(counted, 2)
            self._based += [(a, b) for b in filter(self._layout.is_baseline, counted) for a in counted if a is not b]
            means = {group: of.mean for group in counted if (of := group.spread(metric.value))}
            first, second = [*sorted(means, key=means.__getitem__, reverse=not metric.lowest), None, None][:2]
            if first and second and metric.text(means[first]) != metric.text(means[second]):
                self._best.add(first)

    def document(self) -> Numbers:
        """Returns the numbers of the page as plain values. null: no value, as the deviation of one seed."""
        layout, metric = self._layout, self._metric
        return {
            "title": self._title,
            "metric": list(metric.names),
            "lowest": metric.lowest,
            "by": list(layout.by),
            "x": layout.x,
            "tied": list(layout.tied),
            "baseline": layout.baseline,
            "cells": [_cell(group, layout.keys, self._metrics) for group in layout.groups],
            "differences": [
                {"a": a.overrides, "b": b.overrides, **asdict(a.minus(b, metric.value))} for a, b in self._pairs
            ],
            "samples_to_reach": [_reach(a, b, metric) for a, b in self._based],
            "left_out": [{"point": run.name, "overrides": run.overrides, "reason": why} for run, why in self._left_out],
            "commands": list(self._commands),
            "versions": self._versions(),
            "dates": self._dates(),
        }

    def _versions(self) -> dict[str, list[str]]:
        """Returns the versions that the runs recorded when they started, by package; several if they differ."""
        starts = [event for run in self._runs for event in run.events if event["event"] == "start"]
        found = {name: [event[name] for event in starts if isinstance(event.get(name), str)] for name in PACKAGES}
        return {name: list(dict.fromkeys(versions)) for name, versions in found.items()}

    def _dates(self) -> list[str] | None:
        """Returns the dates (UTC) of the first and of the last line of the runs. None without any."""
        marks = [event["time"] for run in self._runs for event in run.events]
        marks += [row["seconds"] for run in self._runs for row in run.rows]
        return [f"{datetime.fromtimestamp(mark, UTC):%Y-%m-%d}" for mark in (min(marks), max(marks))] if marks else None

    def page(self) -> str:
        """Returns the page as HTML."""
        parallel, curves = run_charts(self._runs, self._layout, self._metric, self._keys)
        parts = [self._summary(), self._results(), section("All runs", parallel, self._all_runs()), curves]
        parts += [metric_by_x(self._layout, self._metric), self._differences(), mean_curves(self._layout, self._metric)]
        parts += [self._left_out_runs(), self._all_commands()]
        scripts, styles = ("chart_tools.js", "chart.js", "parallel.js"), ("chart.css", "parallel.css")
        return page(self._title, "".join(parts), scripts, styles)

    def _summary(self) -> str:
        layout, metric, left = self._layout, self._metric, len(self._left_out)
        mean = f", as the mean of {' and '.join(metric.names)}" if len(metric.names) > 1 else ""
        trained = f" Trained {' to '.join(dict.fromkeys(dates))} (UTC)." if (dates := self._dates()) else ""
        words = f"{self.counted}{f'; {left} left out, listed below' if left else ''}.{trained}"
        best = "lowest" if metric.lowest else "highest"
        words += f" Metric: {metric.label}, the last value of each run{mean}; the {best} is the best."
        if layout.by:
            words += f" Contenders (colours): {' and '.join(layout.by)}."
        if layout.tied:
            each = " and ".join(filter(None, (*layout.by, layout.x)))
            words += f" {', '.join(layout.tied)}: one value for each {each}, regarded as part of it in comparisons."
        return paragraph(words)

    def _results(self) -> str:
        """Returns a row for each group."""
        layout, (metric, *others) = self._layout, self._metrics
        if layout.by == (RUN,):  # the table of all runs has them
            return ""
        rows: list[Row] = []
        for group in layout.groups:
            n, total = len(group.runs), len(group.all)
            rows.append([
                *_overrides(layout.keys, group), _spread(metric, group.spread(metric.value), group in self._best),
                Cell(str(n) if n == total else f"{n} of {total}", n),
                *(_spread(other, group.spread(other.value)) for other in others),
                *(_spread(_PLAIN, group.spread(of)) for of in (_STEP_MS, _RATE)),
            ])  # fmt: skip
        words = "Mean ± sample standard deviation over the seeds. A click on a header sorts."
        if layout.baseline:
            words += f" Bold: the best mean among the groups that differ only in {' and '.join(layout.baseline)}."
        words += " Time of a step: the median over the logged intervals of a run, without evaluations and checkpoints."
        numeric = [metric.heading, "seeds", *(other.heading for other in others), "step, ms", "samples/s"]
        return section("Results", paragraph(words), _table(layout.keys, numeric, rows))

    def _all_runs(self) -> str:
        """Returns a row for each run."""
        keys = [key for key in self._keys if key != RUN]
        rows: list[Row] = []
        for run in self._runs:
            found = [(metric, metric.value(run)) for metric in (*self._metrics, Metric(("train/loss",)))]
            rows.append([
                _override(run.name), *_overrides(keys, run), run.state,
                *(_NONE if value is None else Cell(metric.text(value), value) for metric, value in found),
                _NONE if run.step is None else Cell(f"{run.step:,}", run.step),
                _NONE if (rate := run.samples_per_second) is None else Cell(f"{rate:,.0f}", rate),
                Cell(format_clock(run.seconds), run.seconds),
            ])  # fmt: skip
        numeric = [*(metric.heading for metric in self._metrics), "loss", "step", "samples/s", "time"]
        return _table(["run", *keys, "state"], numeric, rows, [f"r{i}" for i in range(len(rows))])

    def _differences(self) -> str:
        """Returns the differences to the baseline, and those of all pairs."""
        named = " ".join(f"{key}={value}" for key, value in self._layout.baseline.items())
        words = (
            f"Groups are compared where all other overrides are equal. Baseline: {named} (--baseline chooses another). "
            "Pooled deviation: of both groups; bold: a difference of more than 2. Paired difference: mean ± deviation "
            "of the differences between runs of the same seed. Samples to reach: after which the mean first reaches "
            "the final mean of the other group, interpolated between evaluations; then the other's samples by these."
        )
        parts = [paragraph(words), self._difference_table(self._based)]
        if not self._based:
            parts[1] = paragraph("No cell has the baseline and another group with finished runs.")
        if len(self._pairs) > len(self._based):
            parts.append(details(f"all {len(self._pairs)} pairs", self._difference_table(self._pairs)))
        return section("Differences", *parts) if named else ""

    def _difference_table(self, pairs: Iterable[tuple[Group, Group]]) -> str:
        layout, metric = self._layout, self._metric
        rows: list[Row] = []
        for a, b in pairs:
            found, reach = a.minus(b, metric.value), _reach(a, b, metric)
            mean, pooled, units, ratio = found.difference, found.pooled_deviation, found.units, reach["ratio"]
            why = "one seed: no deviation" if pooled is None else "equal values of all seeds"
            reached = f"{'≤ ' if reach['note'] else ''}{reach['samples']:,.0f}" if ratio else reach["note"]
            rows.append([
                layout.name(a), layout.name(b), *_overrides(layout.cell_keys, a),
                ", ".join(map(str, dict.fromkeys(found.seeds))), Cell(metric.text(mean, sign=True), mean),
                _NONE if pooled is None else Cell(metric.text(pooled), pooled),
                Cell(why) if units is None else Cell(_PLAIN.text(units, True, 2), units, abs(units) > _MARKED),
                _spread(metric, found.paired, sign=True),
                Cell(reached, reach["samples"]), _NONE if ratio is None else Cell(f"{1 / ratio:.2f}×", 1 / ratio),
            ])  # fmt: skip
        of = ", percentage points" if metric.share else ""
        numeric = ["seeds", f"difference{of}", f"pooled deviation{of}", "in pooled deviations"]
        numeric += [f"paired difference{of}", "samples to reach", "fewer samples"]
        return _table(["group", "minus", *layout.cell_keys], numeric, rows)

    def _left_out_runs(self) -> str:
        rows = [[run.name, run.label, why] for run, why in self._left_out]
        none = paragraph("None: all runs have finished with a value of the metric.")
        return section("Runs left out", _table(["run", "overrides", "reason"], [], rows) if rows else none)

    def _all_commands(self) -> str:
        launched = self._commands or ["not recorded: the runs were launched by an earlier version"]
        versions = "; ".join(f"{name} {', '.join(of) or 'not recorded'}" for name, of in self._versions().items())
        each = [command(f"{run.command}  # {run.name}") for run in self._runs if run.command not in launched]
        parts = [*map(command, launched), paragraph(f"Versions of the runs: {versions}.")]
        parts += [details(f"commands of all {len(each)} runs", *each)] if each else []
        return section("Commands and versions", *parts)


def _cell(group: Group, keys: Sequence[str], metrics: Sequence[Metric]) -> Numbers:
    """Returns a group. `values` has the metric of each seed; `metrics` has all metrics of the table by label."""
    first, *others = ({**_numbers(group.spread(m.value)), "values": group.numbers(m.value)} for m in metrics)
    return {
        "overrides": {key: group.overrides[key] for key in keys if key in group.overrides},
        "points": len(group.all),
        "seeds": list(group.runs),
        **first,
        "metrics": {metric.label: found for metric, found in zip(metrics[1:], others, strict=True)},
        "step_ms": _numbers(group.spread(_STEP_MS)),
        "samples_per_second": _numbers(group.spread(_RATE)),
        "curve": [asdict(point) for point in group.curve(metrics[0])],
    }


def _numbers(found: Spread | None) -> Numbers:
    return {"mean": found.mean if found else None, "deviation": found.deviation if found else None}


def _reach(group: Group, base: Group, metric: Metric) -> Numbers:
    """Returns the samples after which the mean of a group reaches the final mean of another, or why there are none."""
    final, curve, of_base = base.spread(metric.value), group.curve(metric), base.curve(metric)
    assert final is not None
    samples = samples_to_reach(curve, final.mean, metric.lowest) if of_base else None
    note = "" if curve and of_base else "the seeds were not evaluated after the same samples"
    if samples is None:
        note = note or "not reached"
    elif samples == curve[0].samples:
        note = "at most: reached at the first evaluation" if len(curve) > 1 else "at most: one evaluation, at the end"
    ratio = None if samples is None else samples / of_base[-1].samples
    found = {"group": group.overrides, "baseline": base.overrides, "target": final.mean}
    return {**found, "samples": samples, "ratio": ratio, "note": note}


def _table(names: Sequence[str], numeric: Sequence[str], rows: Sequence[Row], runs: Sequence[str] | None = None) -> str:
    """Returns a table that scrolls in a box of its own if it is long."""
    return f'<div class="tall">{table([*names, *numeric], rows, len(numeric), runs)}</div>'


def _override(text: str) -> Cell:
    return Cell(text, (numbers_of([text]) or {}).get(text))


def _overrides(keys: Iterable[str], of: Group | SweepRun) -> list[Cell]:
    return [_override(of.value(key)) for key in keys]


def _spread(metric: Metric, found: Spread | None, best: bool = False, sign: bool = False) -> Cell:
    """Returns mean ± deviation, both to the second digit of the deviation; shares to hundredths of a percent."""
    if found is None:
        return _NONE
    digits = max(0, 1 - math.floor(math.log10(found.deviation))) if found.deviation else None
    deviation = "" if found.deviation is None else f" ± {metric.text(found.deviation, digits=digits)}"
    return Cell(metric.text(found.mean, sign, digits) + deviation, found.mean, best)
