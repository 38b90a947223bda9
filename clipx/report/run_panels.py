"""Charts of a run: which metrics of metrics.jsonl are drawn together, and how."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clipx.logger import Row
from clipx.report.chart import Chart, Series
from clipx.report.console import is_headline, is_share

MOST_FURTHER = 24  # charts of metrics that have no panel here


@dataclass(frozen=True, slots=True)
class Panel:
    """Metrics with a common axis, by their names after `train/`. The options are those of `Chart`."""

    title: str
    names: tuple[str, ...]
    share: bool = False
    zero: bool = False
    smooth: bool = False


_PANELS = (
    Panel("Loss", ("loss", "contrastive_loss", "caption_loss"), smooth=True),
    Panel("Learning rate", ("lr",), zero=True),
    Panel("Temperature", ("temperature", "temperature_image", "temperature_text")),
    Panel("Samples per second", ("samples_per_second",), zero=True, smooth=True),
    Panel("Time spent waiting for data", ("data_wait_share",), share=True, zero=True, smooth=True),
    Panel("Gradient norm", ("grad_norm", "grad_norm_image", "grad_norm_text", "grad_norm_decoder"), smooth=True),
    Panel("Update of the weights, ‖Δw‖ / ‖w‖", ("update_image", "update_text", "update_decoder"), smooth=True),
    Panel("Memory, GB", ("host_memory_gb", "device_memory_gb"), zero=True),
    Panel("Utilisation of the device", ("mfu", "device_utilization"), share=True, zero=True, smooth=True),
)
_REPEATED = ("samples_per_second_per_device", "data_wait_s")  # shown by another metric


def panels(rows: Sequence[Row]) -> tuple[list[Chart], list[Chart]]:
    """Returns the charts of a run that exist for its metrics, and those of its further metrics, one for each."""
    rows = sorted(rows, key=lambda row: row["samples"])
    logged = list(dict.fromkeys(name for row in rows for name in row if "/" in name))
    main = [_evaluation(rows, logged)]
    for panel in _PANELS:
        names = [f"train/{name}" for name in panel.names if f"train/{name}" in logged]
        series = [_series(rows, name, name.removeprefix("train/"), i) for i, name in enumerate(names)]
        if series:
            main.append(Chart(panel.title, series, share=panel.share, zero=panel.zero, smooth=panel.smooth))
    main.insert(0, main.pop(1)) if len(main) > 1 else None
    return [chart for chart in main if chart.series], list(_further(rows, logged))


def _evaluation(rows: Sequence[Row], logged: Sequence[str]) -> Chart:
    """Returns the chart of the headline metrics of all evaluators."""
    names = sorted(name for name in logged if name.startswith("eval/") and is_headline(name))
    return Chart(
        "Held out: top-1 accuracy and recall@1",
        [_series(rows, name, name.removeprefix("eval/"), i) for i, name in enumerate(names)],
        share=True,
        zero=True,
    )


def _further(rows: Sequence[Row], logged: Sequence[str]) -> Iterator[Chart]:
    """Yields a chart for each other metric that is not constant, at most MOST_FURTHER."""
    drawn = {f"train/{name}" for panel in _PANELS for name in panel.names} | {f"train/{name}" for name in _REPEATED}
    number = 0
    for name in logged:
        if name in drawn or (name.startswith("eval/") and is_headline(name)):
            continue
        series = _series(rows, name, name, 0)
        if len({value for value in series.y if math.isfinite(value)}) > 1 and number < MOST_FURTHER:
            number += 1
            yield Chart(name, [series], share=is_share(name), smooth=name.startswith("train/"), legend=False)


def _series(rows: Sequence[Row], metric: str, name: str, style: int) -> Series:
    points = [(row["samples"], row[metric]) for row in rows if metric in row]
    return Series(name, [x for x, _ in points], [y for _, y in points], style=style)
