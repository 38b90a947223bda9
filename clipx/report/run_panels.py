"""Charts of a run: which metrics of metrics.jsonl are drawn together, and how."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from clipx.logger import Row
from clipx.report.chart import Chart, Series
from clipx.report.console import is_headline, is_share, of_samples

MOST_FURTHER = 24  # charts of metrics that have no panel here
_RATE = "train/samples_per_second"  # in the rows of training intervals, not in those of evaluations

_LOSS = {"loss": "training loss", "contrastive_loss": "contrastive", "caption_loss": "captions"}
_TEMPERATURES = {"temperature": "temperature", "temperature_image": "images", "temperature_text": "captions"}
_NORMS = {"grad_norm": "all", "grad_norm_image": "image tower", "grad_norm_text": "text tower"}
_UPDATES = {"update_image": "image tower", "update_text": "text tower", "update_decoder": "decoder"}
_IN_USE = {"mfu": "model FLOPs", "device_utilization": "time in use"}
_PANELS = (
    (Chart("Loss", smooth=True), _LOSS),
    (Chart("Learning rate", log=True), {"lr": "learning rate"}),
    (Chart("Temperature"), _TEMPERATURES),
    (Chart("Samples per second", zero=True, smooth=True), {"samples_per_second": "samples per second"}),
    (Chart("Gradient norm", smooth=True), {**_NORMS, "grad_norm_decoder": "decoder"}),
    (Chart("Time spent waiting for data", share=True, zero=True, smooth=True), {"data_wait_share": "waiting"}),
    (Chart("Update of the weights, ‖Δw‖ / ‖w‖", smooth=True), _UPDATES),
    (Chart("Memory, GB", zero=True), {"host_memory_gb": "host", "device_memory_gb": "device"}),
    (Chart("Utilisation of the device", share=True, zero=True, smooth=True), _IN_USE),
)
"""Charts without their series: training metrics by their names after `train/`, with words for them."""

_REPEATED = ("samples_per_second_per_device", "data_wait_s")  # shown by another metric
_OF_INTERVALS = ("per_second", "per_second_per_device", "_s", "/data_wait_share", "/mfu")  # rates and times


def panels(rows: Sequence[Row]) -> tuple[list[Chart], list[Chart]]:
    """Returns the charts of a run that exist for its metrics, and those of its further metrics, one for each."""
    rows = sorted(rows, key=lambda row: row["samples"])
    logged = list(dict.fromkeys(name for row in rows for name in row if "/" in name))
    held_out = sorted(name for name in logged if name.startswith("eval/") and is_headline(name))
    last = {name: value for row in rows for name, value in row.items()}
    shown = {name: name.removeprefix("eval/") + of_samples(name, last) for name in held_out}
    main = [_chart(Chart("Held out: top-1 accuracy and recall@1", share=True, zero=True), rows, shown)]
    drawn = {*held_out, *(f"train/{name}" for name in _REPEATED)}
    for chart, names in _PANELS:
        found = {name: names[key] for key in names if (name := f"train/{key}") in logged}
        main.append(_chart(chart, rows, found))
        drawn |= found.keys()
    main[:2] = main[1::-1]  # the loss first
    further = _further(rows, [name for name in logged if name not in drawn])
    return [chart for chart in main if chart.series], list(islice(further, MOST_FURTHER))


def _chart(chart: Chart, rows: Sequence[Row], names: Mapping[str, str]) -> Chart:
    """Returns a chart with a series for each metric in `names`."""
    return replace(chart, series=[_series(rows, *item, i) for i, item in enumerate(names.items())])


def _further(rows: Sequence[Row], names: Sequence[str]) -> Iterator[Chart]:
    """Yields a chart for each metric that is not constant."""
    for name in names:
        series = _series(rows, name, name, 0)
        if len({value for value in series.y if math.isfinite(value)}) > 1:
            yield Chart(name, [series], share=is_share(name), smooth=name.startswith("train/"), legend=False)


def _series(rows: Sequence[Row], metric: str, name: str, style: int) -> Series:
    """Returns the values of a metric: of training, those of the rows of training intervals if these have any.

    Rows of evaluations repeat some, such as the learning rate, as they are for the next step.
    """
    found = [row for row in rows if metric in row]
    trained = [row for row in found if _RATE in row and metric.startswith("train/")]
    if trained and metric.endswith(_OF_INTERVALS) and _ends_early(trained):
        del trained[-1]
    points = [(row["samples"], row[metric]) for row in trained or found]
    return Series(name, [x for x, _ in points], [y for _, y in points], style=style)


def _ends_early(rows: Sequence[Row]) -> bool:
    """Returns whether the last interval is shorter than the others, as that of the last steps of a run often is."""
    lengths = np.diff([0.0, *(row["samples"] for row in rows)])
    return len(lengths) > 1 and bool(lengths[-1] < 0.95 * np.median(lengths[:-1]))
