"""JSON document of the report: all numbers of the page, for documents that are generated from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from clipx.report.seed_statistics import Spread
from clipx_launch.commands.report import facts
from clipx_launch.commands.report.comparisons import Pair, Reach, pairs, reaches
from clipx_launch.commands.report.groups import Group, Metric
from clipx_launch.commands.report.sweep_page import Content


def document(content: Content) -> dict[str, Any]:
    """Returns the numbers of the page as plain values. null: no value, as the deviation of one seed."""
    layout, metric = content.layout, content.metric
    return {
        "title": content.title,
        "metric": list(metric.names),
        "lowest": metric.lowest,
        "by": list(layout.by),
        "x": layout.x,
        "tied": list(layout.tied),
        "baseline": layout.baseline,
        "cells": [_cell(group, layout.keys, content.metrics) for group in layout.groups],
        "differences": [_pair(pair) for pair in pairs(layout, metric)] if layout.baseline else [],
        "samples_to_reach": [_reach(reach) for reach in reaches(layout, metric)],
        "left_out": [
            {"point": item.run.name, "overrides": item.run.varied, "reason": item.reason} for item in content.left_out
        ],
        "commands": facts.commands(content.folders),
        "versions": facts.versions(content.runs),
        "dates": facts.dates(content.runs),
    }


def _cell(group: Group, keys: Sequence[str], metrics: Sequence[Metric]) -> dict[str, Any]:
    """Returns a group. `values` has the metric of each seed; `metrics` has all metrics of the table by label."""
    first, *others = ({**_spread(group.spread(metric)), "values": group.numbers(metric)} for metric in metrics)
    return {
        "overrides": {key: group.overrides[key] for key in keys if key in group.overrides},
        "points": group.points,
        "seeds": list(group.runs),
        **first,
        "metrics": {metric.label: found for metric, found in zip(metrics[1:], others, strict=True)},
        "step_ms": _spread(group.step_ms),
        "samples_per_second": _spread(group.samples_per_second),
        "curve": [asdict(point) for point in group.curve(metrics[0])],
    }


def _spread(found: Spread | None) -> dict[str, float | None]:
    return {"mean": found.mean if found else None, "deviation": found.deviation if found else None}


def _pair(pair: Pair) -> dict[str, Any]:
    found = pair.difference
    return {
        "a": pair.a.overrides,
        "b": pair.b.overrides,
        "difference": found.mean,
        "pooled_deviation": found.pooled,
        "units": found.units,
        "seeds": list(found.n),
        "paired": asdict(found.paired) if found.paired else None,
    }


def _reach(reach: Reach) -> dict[str, Any]:
    return {
        "group": reach.group.overrides,
        "baseline": reach.baseline.overrides,
        "target": reach.target,
        "samples": reach.samples,
        "ratio": reach.ratio,
        "note": reach.note,
    }
