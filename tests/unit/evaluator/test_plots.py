"""Plots of evaluations: names of sets and models are drawn literally."""

from __future__ import annotations

import pytest
from helpers.color_model import dataset
from helpers.runs import compose

from clipx.evaluator.plots import plot_models, plot_sets, plot_steps
from clipx.evaluator.suite import Suite, Task
from clipx.evaluator.tables import AVERAGE, DROP, Evaluated
from clipx.report.figure import attempt

TEX = r"$\frac{$"
PNG = b"\x89PNG"


def test_names_with_tex_are_no_formulas() -> None:
    row = {"top1": 0.5, DROP: 0.1}
    assert plot_sets(TEX, {TEX: {TEX: row, AVERAGE: row}}).startswith(PNG)
    name = f"eval/zeroshot/{TEX}/top1"
    found = [Evaluated(TEX, step, {name: 0.5, "eval/zeroshot/top1": 0.6}) for step in (1, 2)]
    assert plot_steps(TEX, found).startswith(PNG)
    spec = compose(f"data.name='{TEX}'")
    tasks = [Task("zeroshot", name, spec.data, dataset(["red"], labels=[0])) for name in (None, TEX)]
    suite = Suite({"zeroshot": spec.evaluator["zeroshot"]}, tasks)
    assert plot_models(TEX, found, suite).startswith(PNG)


def test_a_failed_plot_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert attempt("the plot", lambda: plot_sets("title", {}), ) is None  # fmt: skip
    (message,) = caplog.messages
    assert message.startswith("the plot failed (ValueError: ") and message.endswith("all other results are complete")
    assert "\n" not in message
