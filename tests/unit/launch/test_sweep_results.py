"""Results of a sweep: best point, table and logs."""

from __future__ import annotations

import csv
import io
import json
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from helpers.runs import rows
from helpers.sweeps import idle_process, make_sweep, refused, train, write_lock
from helpers.waiting import wait_until

from clipx_launch.__main__ import main
from clipx_launch.commands import logs
from clipx_launch.commands.runs import varied
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
    assert main(["best", str(sweep), "--metric", metric, "--json", *(["--lowest"] if lowest else [])]) == 0
    found = json.loads(capsys.readouterr().out)
    numbers = [number(sweep, point, metric) for point in "01"]
    assert found["value"] == (min(numbers) if lowest or metric == "train/loss" else max(numbers))
    assert found["value"] == numbers[found["point"]]
    assert found["overrides"] == dict(text.split("=") for text in TYPED[found["point"]])
    assert found["run"] == str(sweep / str(found["point"]))
    assert found["checkpoint"] == f"{found['run']}/checkpoints/step-00000004"
    assert (found["points"], found["points_with_value"], found["step"]) == (4, 2, 4)


def test_best_prints_the_best_point_by_the_first_headline_metric(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["best", str(sweep)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(METRIC)
    assert "finished; of 4 points 2 have a value" in shown
    assert "optimizer.lr=" in shown
    assert f"'{sweep}/" in shown, "quoted for the shell"


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
    text = (sweep / "results.csv").read_text()
    for row, other in zip(written, csv.DictReader(io.StringIO(text)), strict=True):
        assert {name: "" if value is None else str(value) for name, value in row.items()} == other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["best", "--metric", "eval/retrieval/text_to_image/median_rnk"], "(did you mean eval/retrieval/text_to_image/median_rank?)"),
        (["results", "--metric", "top1"], "metric=top1 is not a metric of these runs: give one of eval/retrieval/"),
        (["logs", "7"], "point 7 is not in this sweep: give one of 0, 1, 2, 3"),
        (["cancel", "7"], "point 7 is not in this sweep: give one of 0, 1, 2, 3"),
        (["logs", "2", "--rank", "2"], "--rank=2 has no log at point 2: give one of 0, 1"),
    ],
)  # fmt: skip
def test_unknown_metrics_points_and_ranks_print_a_one_line_error(
    sweep: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, arguments[0], sweep, *arguments[1:])


def test_a_sweep_without_values_prints_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sweep(tmp_path, ["seed=0"])
    assert f"metric=train/loss has no value yet in {tmp_path}" in refused(capsys, "best", tmp_path)


# --------------------------------------------------------------------------------------------------------- logs


def test_logs_shows_all_ranks_of_failed_points(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(sweep), "--lines", "3"]) == 0
    folder = sweep / "2/.launch/logs"
    assert capsys.readouterr().out == (
        f"==> {folder}/local.0.log <==\nline 97\nline 98\nline 99\n"
        f"==> {folder}/local.1.log <==\nTraceback\nRuntimeError: a bug of rank 1\n"
    )
    assert main(["logs", str(sweep), "2", "--rank", "0", "--lines", "0"]) == 0
    assert capsys.readouterr().out.count("\nline") == 100
    assert main(["logs", str(sweep), str(sweep / "3")]) == 0
    assert capsys.readouterr().out.startswith("point 3 is waiting (in the queue of pid ")
    failed = sweep / "2/.launch/result.json"
    failed.rename(aside := failed.with_suffix(".aside"))
    assert main(["logs", str(sweep)]) == 0
    aside.rename(failed)
    assert capsys.readouterr().out == (
        f"no point has failed; name one of the points with logs:\n  2  starting  2 in {folder}\n"
    )


def test_followed_logs_continue_until_the_point_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_POLL_S", 0.02)
    point = make_sweep(tmp_path, ["seed=0"]).planned[0].point
    log, printed = point.logs / "local.0.log", ""
    log.write_text("before\n")

    def wait_for(text: str) -> None:
        def is_printed() -> bool:
            nonlocal printed
            printed += capsys.readouterr().out
            return text in printed

        wait_until(is_printed, lambda: f"{text!r} was not printed: {printed!r}")

    with idle_process() as (_, holder):
        write_lock(point.folder, holder)
        follow = threading.Thread(target=main, args=(["logs", str(tmp_path), "0", "--follow"],))
        follow.start()
        wait_for("before\n")
        for name, text in (("local.0.log", "before\nafter\n"), ("local.1.log", "of another rank\n")):
            (point.logs / name).write_text(text)
            wait_for(text.splitlines()[-1])
        assert follow.is_alive()
        point.write_result(Result("finished"))
        follow.join(600)
        assert not follow.is_alive()
    printed += capsys.readouterr().out
    assert printed == (
        f"==> {log} <==\nbefore\nafter\n==> {point.logs}/local.1.log <==\nof another rank\n"
    )  # fmt: skip


def test_of_equal_points_the_first_is_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for planned in make_sweep(tmp_path, *([f"seed={seed}"] for seed in range(4))).planned:
        value = {0: 2.0, 3: 2.0}.get(planned.point.index, 1.0)
        row = {"step": 1, "samples": 32, "epoch": 0.1, "seconds": 0, "train/loss": value, "eval/a/top1": value}
        (planned.point.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    for metric, best in (("eval/a/top1", 0), ("train/loss", 1)):
        main(["best", str(tmp_path), "--metric", metric, "--json"])
        assert json.loads(capsys.readouterr().out)["point"] == best


def test_overrides_common_to_all_points_are_omitted() -> None:
    assert varied([["a=1", "b=1"], ["a=1", "b=2", "+c=x=y"], ["~d", "a=1"]]) == [
        {"b": "1"}, {"b": "2", "c": "x=y"}, {"d": ""},
    ]  # fmt: skip
