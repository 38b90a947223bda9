"""Metrics in real files: JSON lines, TensorBoard events, offline runs of wandb."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.runs import compose

from clipx.errors import DataError
from clipx.logger import Jsonl, Sinks, open_sinks, read_rows
from clipx.logger.tensorboard import TensorBoardSpec
from clipx.storage.jsonl import read_objects


def row(step: int) -> dict[str, float]:
    return {"step": step, "samples": step * 10, "epoch": 0.1, "seconds": 1.0, "train/loss": 1 / step}


def test_a_resumed_run_drops_rows_after_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row(step)) + "\n" for step in (1, 2, 3, 4)))
    sink = Jsonl(path, 2)
    sink.log(row(3))
    sink.close()
    assert [r["step"] for r in read_rows(path)] == [1, 2, 3]


def test_an_incomplete_line_loses_no_other_object(tmp_path: Path) -> None:
    """A process that is killed, or a full disk, leaves one; a later process appends to it."""
    path = tmp_path / "events.jsonl"
    events = [{"time": 1.0, "event": "start"}, {"time": 2.0, "event": "lock_taken_over", "of": {"id": "x", "pid": 7}}]
    lines = [json.dumps(event) for event in events]
    for cut in (1, 20, len(lines[1]) - 1):
        path.write_text(f"{lines[1]}\n{lines[1][:cut]}{lines[0]}\n{lines[1][:cut]}")
        assert read_objects(path) == [events[1], events[0]]
    path.write_text(f"{lines[0]}\n" + "\0" * 20)  # of a power failure
    assert read_objects(path) == [events[0]]


@contextlib.contextmanager
def disk_full(path: Path) -> Iterator[None]:
    """Limits all files to the current size of `path`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_no_row_and_does_not_end_the_run(tmp_path: Path) -> None:
    reported: list[str] = []
    path = tmp_path / "metrics.jsonl"
    sinks = Sinks([Jsonl(path, 0)], lambda kind, **facts: reported.append(facts["logger"]))
    sinks.log(row(1))
    with disk_full(path):
        sinks.log(row(2))
        sinks.log(row(3))
    assert reported == ["jsonl"], "reported more than once"
    sinks.log(row(4))
    sinks.close()
    assert read_rows(path) == [row(step) for step in (1, 2, 3, 4)]


def test_rows_that_are_never_written_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The disk stays full, or the file was removed, which while it is open takes all rows."""
    for fault in (disk_full, contextlib.nullcontext):
        path = tmp_path / "metrics.jsonl"
        path.unlink(missing_ok=True)
        sinks = Sinks([Jsonl(path, 0)], lambda kind, **facts: None)
        sinks.log(row(1))
        with fault(path):
            if fault is contextlib.nullcontext:
                path.unlink()
            sinks.log(row(2))
            sinks.log(row(3))
            caplog.clear()
            sinks.close()
            sinks.close()
        assert len(caplog.records) == 1
        assert "metrics.jsonl cannot be written" in caplog.text and "its last 2 rows are lost" in caplog.text


def test_a_failing_sink_does_not_affect_the_others(tmp_path: Path) -> None:
    class Down:
        def log(self, row: dict[str, float]) -> None:
            raise ConnectionError("the service is down")

        def close(self) -> None:
            raise ConnectionError("still")

    reported: list[str] = []
    sinks = Sinks([Down(), Jsonl(tmp_path / "m.jsonl", 0)], lambda kind, **facts: reported.append(facts["message"]))
    for step in (1, 2):
        sinks.log(row(step))
    sinks.close()
    assert read_rows(tmp_path / "m.jsonl") == [row(1), row(2)]
    assert reported == [
        "down failed to log metrics (ConnectionError: the service is down): the run continues without it"
    ]


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_logger_that_cannot_start_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The folder of the run is a file for the logger: also for root, who may write to any folder."""
    path = tmp_path / "run"
    path.mkdir()
    spec = compose(f"logger=[{kind}]", *(["logger.wandb.mode=offline"] if kind == "wandb" else [])).logger
    (tmp_path / "file").touch()
    build = type(spec[kind]).build
    monkeypatch.setattr(type(spec[kind]), "build", lambda self, run_dir, *more: build(self, tmp_path / "file", *more))
    with pytest.raises(DataError) as error:
        open_sinks(spec, path, "run", {}, 0, lambda kind, **facts: None)
    text = str(error.value)
    assert "\n" not in text and len(text) < 500 and "cannot " in text
    assert text.endswith(f"): correct it, or drop {kind}; no step was trained")


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = TensorBoardSpec()
    for start, value in ((0, 0.5), (2, 0.25)):  # the first run ended after step 3 and saved step 2
        sink = spec.build(tmp_path / f"{start}", "run", {}, start)
        for step in range(start + 1, 4):
            sink.log(row(step) | {"train/loss": value})
        sink.close()
        (file,) = (tmp_path / f"{start}/tensorboard").iterdir()
        file.rename(tmp_path / f"events.out.tfevents.{start}")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.5), (3, 0.25)]


def test_wandb_writes_into_a_relative_run_directory_after_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run starts wandb's process, which stays in its folder and serves the second one, too."""
    spec = compose("logger=[wandb]", "logger.wandb.mode=offline")
    for place in (tmp_path / "first", tmp_path / "second"):
        (place / "run").mkdir(parents=True)
        monkeypatch.chdir(place)
        sink = spec.logger["wandb"].build(Path("run"), "run", {}, 0)
        sink.log({"step": 1, "train/loss": 0.5})
        sink.close()
        assert len(list(place.glob("run/wandb/offline-run-*/run-*.wandb"))) == 1
