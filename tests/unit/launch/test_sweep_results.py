"""Results of a sweep: best point, table and logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet
import pytest
from helpers.runs import rows
from helpers.sweeps import make_sweep, refused, train

from clipx_launch.__main__ import main
from clipx_launch.point import Result

TYPED = (
    ["optimizer.lr=1e-4", "seed=0"],
    ["optimizer.lr=1e-3", "seed=0"],
    ["optimizer.lr=1e-2", "seed=1", "data.prefetch=1"],
    ["optimizer.lr=1e-1", "seed=1"],
)
METRIC = "eval/retrieval/image_to_text/recall@1"
MEDIAN = "eval/retrieval/text_to_image/median_rank"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a sweep with two finished points, one that failed on one of its two ranks, and one never started."""
    folder = tmp_path_factory.mktemp("results") / "a sweep"
    made = make_sweep(folder, *TYPED, common=("duration=4st", "evaluator=[retrieval]", "checkpoint.every=2st"))
    for planned in made.planned[:2]:
        train(planned)
    failed = made.planned[2].point
    failed.write_result(Result("failed", 1, error="RuntimeError: a bug of rank 1"))
    (failed.logs / "local.0.log").write_text("".join(f"line {i}\n" for i in range(100)))
    (failed.logs / "local.1.log").write_text("Traceback\nRuntimeError: a bug of rank 1")
    return folder


def number(sweep: Path, point: str, name: str) -> float:
    """Returns the last value that the run logged."""
    return [row[name] for row in rows(sweep / point) if name in row][-1]


@pytest.mark.parametrize("metric", [METRIC, MEDIAN, "train/loss"])
@pytest.mark.parametrize("lowest", [True, False])
def test_the_best_point_has_the_best_last_value(
    sweep: Path, capsys: pytest.CaptureFixture[str], metric: str, lowest: bool
) -> None:
    assert main(["status", str(sweep), "--best", "--metric", metric, "--json", *(["--lowest"] if lowest else [])]) == 0
    found = json.loads(capsys.readouterr().out)
    numbers = [number(sweep, point, metric) for point in "01"]
    assert found["value"] == (min(numbers) if lowest or metric == "train/loss" else max(numbers))
    assert found["value"] == numbers[found["point"]]
    assert found["overrides"] == dict(text.split("=") for text in TYPED[found["point"]])
    assert found["run"] == str(sweep / str(found["point"]))
    assert found["checkpoint"] == f"{found['run']}/checkpoints/step-00000004"
    assert (found["points"], found["points_with_value"], found["step"]) == (4, 2, 4)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("status s --metric train/loss", "--metric=train/loss has no effect without --best: add --best"),
        ("status s --lowest", "--lowest has no effect without --best: add --best"),
        ("status s --best --watch", "--watch has no effect with --best or --json: remove it"),
        ("status s --json --live", "--live has no effect with --best or --json: remove it"),
        ("status s t --best", "--best takes one sweep, not 2: give one of s, t"),
        ("best s --json", "clipx-sweep best is now clipx-sweep status s --json --best"),
    ],
)
def test_options_of_the_best_point_are_refused_elsewhere(
    capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    assert refused(capsys, *words.split()) == f"error: {says}\n"


@pytest.fixture(scope="module")
def written(sweep: Path) -> list[dict[str, Any]]:
    assert main(["results", str(sweep)]) == 0
    return pyarrow.parquet.read_table(sweep / "results.parquet").to_pylist()


def test_results_have_a_row_per_point_in_both_files(sweep: Path, written: list[dict[str, Any]]) -> None:
    assert [row["optimizer.lr"] for row in written] == [1e-4, 1e-3, 1e-2, 1e-1], "numbers, not text"
    assert [row["seed"] for row in written] == [0, 0, 1, 1]
    assert [row["data.prefetch"] for row in written] == [None, None, 1, None]
    assert [row["state"] for row in written] == ["finished", "finished", "failed", "waiting"]
    assert [row["reason"] for row in written[:3]] == [None, None, "RuntimeError: a bug of rank 1"]
    assert [row["step"] for row in written] == [4, 4, None, None]
    assert [row["train/loss"] for row in written[:2]] == [number(sweep, point, "train/loss") for point in "01"]
    assert [row[MEDIAN] for row in written] == [number(sweep, "0", MEDIAN), number(sweep, "1", MEDIAN), None, None]
    assert all(row[f"best/{METRIC}"] >= row[METRIC] for row in written[:2])
    assert all(row["samples_per_second"] > 0 and row["seconds"] > 0 for row in written[:2])
    options = pyarrow.csv.ConvertOptions(column_types={"run": pyarrow.string()}, strings_can_be_null=True)
    assert pyarrow.csv.read_csv(sweep / "results.csv", convert_options=options).to_pylist() == written


# --------------------------------------------------------------------------------------------------------- logs


def test_follow_prints_the_new_lines_of_known_and_new_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (planned,) = make_sweep(tmp_path, ["seed=0"]).planned
    first, second = (planned.point.logs / f"local.{rank}.log" for rank in range(2))
    first.write_text("a\nb\n")

    def end(_: float) -> None:
        with first.open("a") as file:
            file.write("c\n")
        second.write_text("d\ne\n")
        planned.point.write_result(Result("finished"))

    monkeypatch.setattr("time.sleep", end)
    assert main(["logs", str(tmp_path), "0", "--lines", "1", "--follow"]) == 0
    assert capsys.readouterr().out == f"==> {first} <==\nb\nc\n==> {second} <==\nd\ne\n"


def test_the_results_of_a_sweep_without_metrics_are_its_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_sweep(tmp_path, ["seed=0"], ["seed=1"])
    assert main(["results", str(tmp_path)]) == 0, capsys.readouterr().err
    table = pyarrow.parquet.read_table(tmp_path / "results.parquet")
    assert table.column("seed").to_pylist() == [0, 1]
    assert table.column("train/loss").to_pylist() == [None, None]
