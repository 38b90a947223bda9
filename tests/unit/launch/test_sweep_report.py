"""`clipx-sweep report`: the page and the JSON document of a sweep, written through its points."""

from __future__ import annotations

import json
import math
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.html_page import Page
from helpers.runs import small

from clipx_launch.__main__ import main
from clipx_launch.options import LocalSpec
from clipx_launch.planned import Planned
from clipx_launch.point import Point, Result
from clipx_launch.sweep import Sweep

I2T, T2I = (f"eval/retrieval/{way}/recall@1" for way in ("image_to_text", "text_to_image"))
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the samples, at which runs are evaluated
TOTAL = 640


def write_sweep(folder: Path, *typed: list[str]) -> list[Point]:
    """Writes a sweep as a launcher does, with a point for each list of overrides, none of them composed or started."""
    spec = small(Path("run"))
    sweep = Sweep(folder, dict(enumerate(typed)))
    for index, overrides in sweep.overrides.items():
        point = Point(folder=folder / f"{index}", index=index, overrides=overrides, content="x")
        sweep.planned.append(Planned(point, spec))
    sweep.pending = list(sweep.planned)
    sweep.create_points(submitted=None)
    (folder / ".launch").mkdir(exist_ok=True)
    sweep.save(LocalSpec())
    return [planned.point for planned in sweep.planned]


def write_run(point: Point, final: float, **more: float) -> None:
    """Writes a run whose evaluations grow linearly to `final`, at a step of 16 samples and 10 ms."""
    rows = []
    for share in SHARES:
        row = {"step": share * TOTAL / 16, "samples": share * TOTAL, "epoch": share, "seconds": 1.75e9 + share}
        rows.append({**row, "train/loss": 3 - share, "train/samples_per_second": 1600.0, **more})
        rows.append({**row, I2T: share * final - 0.01, T2I: share * final + 0.01})
    (point.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    versions = {"clipx": "0.1.0+1f", "torch": "2.15.0", "timm": "1.0.31", "python": "3.11"}
    (point.folder / "events.jsonl").write_text(json.dumps({"time": 1.75e9, "event": "start", **versions}) + "\n")
    point.write_result(Result("finished"))


def value_of(overrides: dict[str, str]) -> float:
    """Returns the final metric of a point of the sweep below: reproducible and different for each."""
    number = {"infonce": 0.3, "dcl": 0.4, "sogclr": 0.6}[overrides["objective"]]
    number += 0.001 * int(overrides["data.batch_size"]) - 0.1 * float(overrides["data.mismatched"])
    return number + 0.01 * math.sin(37 * (number + int(overrides["seed"])))


GRID = [
    {"objective": o, "data.batch_size": b, "data.mismatched": m, "seed": s}
    for o in ("infonce", "dcl", "sogclr")
    for b in ("64", "16")
    for m in ("0", "0.2")
    for s in ("0", "1", "2")
]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a sweep of 36 points: one failed, one never ended, one has no finite metric."""
    folder = tmp_path_factory.mktemp("report") / "a sweep"
    command, sys.argv = sys.argv, ["/home/a/clipx/train.py", "-m", "objective=infonce,dcl,sogclr", "logger=[]"]
    try:
        points = write_sweep(folder, *([f"{key}={value}" for key, value in typed.items()] for typed in GRID))
    finally:
        sys.argv = command
    for point, typed in zip(points, GRID, strict=True):
        gamma = {"train/gamma": 0.6, "train/log_u": -2.0} if typed["objective"] == "sogclr" else {}
        write_run(point, value_of(typed), **gamma)
    write_run(points[35], math.nan)
    (points[34].files / "result.json").unlink()
    (points[33].files / "result.json").unlink()
    points[33].write_result(Result("failed", 1, error="RuntimeError: <b>a bug</b>\nof line 2"))
    return folder


def report(*arguments: str | Path) -> tuple[str, dict[str, Any]]:
    """Returns the page and the document, written to report.html in the first folder."""
    assert main(["report", *map(str, arguments)]) == 0
    page = Path(arguments[0]) / "report.html"
    return page.read_text(encoding="utf-8"), json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def written(sweep: Path) -> tuple[str, dict[str, Any]]:
    return report(sweep)


def test_cells_have_the_mean_and_the_deviation_of_their_seeds(written: tuple[str, dict[str, Any]]) -> None:
    _, document = written
    assert document["metric"] == [I2T, T2I]
    assert len(document["cells"]) == 12
    for cell in document["cells"]:
        same = [typed for typed in GRID[:33] if all(typed[k] == v for k, v in cell["overrides"].items())]
        values = [value_of(typed) for typed in same]
        assert cell["points"] == 3
        assert cell["seeds"] == [typed["seed"] for typed in same]
        if not values:
            assert cell["mean"] is None
            continue
        assert cell["mean"] == pytest.approx(np.mean(values))
        assert cell["deviation"] == pytest.approx(np.std(values, ddof=1))
        assert cell["values"] == {typed["seed"]: pytest.approx(value_of(typed)) for typed in same}
        assert cell["metrics"][I2T]["mean"] == pytest.approx(np.mean(values) - 0.01)
        assert cell["step_ms"]["mean"] == pytest.approx(10)
        assert cell["samples_per_second"] == {"mean": 1600, "deviation": 0}
        assert [point["samples"] for point in cell["curve"]] == [share * TOTAL for share in SHARES]
    assert [cell["overrides"]["data.batch_size"] for cell in document["cells"][:3]] == ["16", "16", "64"], "not sorted"


def test_differences_compare_groups_with_the_same_other_overrides(written: tuple[str, dict[str, Any]]) -> None:
    _, document = written
    assert (document["by"], document["x"]) == (["objective"], "data.batch_size")
    assert document["baseline"] == {"objective": "infonce"}
    found = {(json.dumps(d["a"]), json.dumps(d["b"])): d for d in document["differences"]}
    expected = 0
    for a, b in combinations([cell for cell in document["cells"] if cell["seeds"]], 2):
        if any(a["overrides"][key] != b["overrides"][key] for key in ("data.batch_size", "data.mismatched")):
            continue
        expected += 1
        pair = found[json.dumps(a["overrides"]), json.dumps(b["overrides"])]
        x, y = (np.array(list(cell["values"].values())) for cell in (a, b))
        pooled = math.sqrt((x.var(ddof=1) * (len(x) - 1) + y.var(ddof=1) * (len(y) - 1)) / (len(x) + len(y) - 2))
        assert pair["difference"] == pytest.approx(x.mean() - y.mean())
        assert pair["units"] == pytest.approx((x.mean() - y.mean()) / pooled)
        assert pair["paired"]["mean"] == pytest.approx((x - y).mean())
        assert pair["paired"]["deviation"] == pytest.approx((x - y).std(ddof=1))
    assert len(found) == expected == 3 * 3 + 1


def test_samples_to_reach_the_final_mean_of_the_baseline(written: tuple[str, dict[str, Any]]) -> None:
    _, document = written
    means = {tuple(cell["overrides"].values()): cell["mean"] for cell in document["cells"]}
    assert len(document["samples_to_reach"]) == 7, "a baseline is compared with itself"
    for reach in document["samples_to_reach"]:
        name, *cell = reach["group"].values()
        ratio = means["infonce", *cell] / means[name, *cell]  # evaluations grow linearly from the first one
        assert reach["target"] == pytest.approx(means["infonce", *cell])
        assert (reach["samples"], reach["ratio"]) == (pytest.approx(TOTAL * ratio), pytest.approx(ratio))


def test_points_that_are_not_counted_are_listed(written: tuple[str, dict[str, Any]]) -> None:
    page, document = written
    left = {item["point"]: item["reason"] for item in document["left_out"]}
    assert left.keys() == {"33", "34", "35"}
    assert left["33"] == "failed at step 40: RuntimeError: <b>a bug</b>"
    assert left["34"] == "waiting at step 40"
    assert left["35"] == "has no finite value of eval/retrieval/recall@1 (mean of 2)"
    shown = Page(page).text
    assert "33 of 36 runs in 12 groups; 3 left out" in shown
    assert "0 of 3" in shown
    for reason in left.values():
        assert reason in shown


# ---------------------------------------------------------------------------------------------- runs outside a sweep
