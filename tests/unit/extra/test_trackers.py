"""MLflow and trackio: real stores on disk, read back by their own clients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from clipx.errors import ConfigError
from clipx.extra.trackers.mlflow import MlflowSpec, mlflow_name
from clipx.extra.trackers.trackio import TrackioSpec
from clipx.logger import Sink

CONFIG = {"model": {"name": "tiny", "size": [1, 2]}, "notes": "x" * 7000}


def row(step: int, **metrics: float) -> dict[str, float]:
    return {"step": step, "samples": step * 10, "epoch": 0.1, "seconds": 1.0, **(metrics or {"train/loss": 1 / step})}


def log(sink: Sink, *logged: dict[str, float]) -> None:
    for values in logged:
        sink.log(values)
    sink.close()


def trackio_runs(project: str) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each run of a project, by its name."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = trackio.Api().runs(project)
    return {r.name: SQLiteStorage.get_logs(project, r.name, run_id=r.id) for r in runs}


def mlflow_run(run_dir: Path) -> tuple[Any, Any]:
    """Returns the client of the run's store, and the only run in it."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return client, found


def test_trackio_contains_rows_and_configuration_and_a_resumed_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import trackio

    spec = TrackioSpec(project="resumed")
    infinite = row(2, **{"eval/a@1": 0.5, "b": math.nan, "c": -math.inf})
    log(spec.build(tmp_path, "mine", CONFIG, 0), row(1), row(2), infinite, row(3))
    log(spec.build(tmp_path, "mine", {**CONFIG, "notes": ""}, 2), row(3), row(3, **{"eval/a@1": 0.25}), row(4))
    ((name, stored),) = trackio_runs("resumed").items()
    assert name == "mine"
    assert [r["train/loss"] for r in stored if "train/loss" in r] == [1, 0.5, 1 / 3, 0.25]
    assert [(r["step"], r["eval/a@1"]) for r in stored if "eval/a@1" in r] == [(2, 0.5), (3, 0.25)]
    assert [(math.isnan(r["b"]), r["c"]) for r in stored if "b" in r] == [(True, -math.inf)]
    (found,) = trackio.Api().runs("resumed")
    assert found.config is not None and found.config["model.name"] == "tiny" and found.config["model.size"] == [1, 2]
    assert capsys.readouterr().out == ""


def test_a_new_run_with_a_used_name_gets_a_number(tmp_path: Path) -> None:
    spec = TrackioSpec(project="numbered")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        log(spec.build(tmp_path / folder, "mine", {}, 0), row(1))
    assert sorted(trackio_runs("numbered")) == ["mine", "mine-2"]


@pytest.mark.slow  # 10 s: MLflow creates its tables
def test_mlflow_contains_rows_and_configuration_and_a_resumed_run_continues(tmp_path: Path) -> None:
    spec = MlflowSpec()
    log(spec.build(tmp_path, "mine", CONFIG, 0), row(1), row(2), row(2, a=math.nan, b=math.inf), row(3))
    changed = {**CONFIG, "model": {"name": "vit", "size": [1, 2]}}
    log(spec.build(tmp_path, "mine", changed, 2), row(3), row(3, **{"eval/a@1": 0.25}), row(4))
    client, found = mlflow_run(tmp_path)
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.params == {"model.name": "tiny", "model.size": "[1, 2]", "notes": "x" * 6000}
    assert {k: v for k, v in found.data.tags.items() if "resumed" in k} == {"resumed/model.name": "vit"}
    assert mlflow_name("eval/zeroshot/größe (x)") == "eval/zeroshot/gr__e _x_"
    history = {
        name: client.get_metric_history(found.info.run_id, name) for name in ("train/loss", "a", "b", "eval/a_at_1")
    }
    assert [(m.step, m.value) for m in history["train/loss"]] == [(1, 1), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert math.isnan(history["a"][0].value) and history["b"][0].value > 1e308
    assert [(m.step, m.value) for m in history["eval/a_at_1"]] == [(3, 0.25)]
    (tmp_path / "mlflow_id").write_text("0" * 32)
    with pytest.raises(ConfigError, match=r"tracking_uri=null cannot continue the run named in .*mlflow_id .*remove"):
        spec.build(tmp_path, "mine", CONFIG, 4)
    (far := tmp_path / "far").mkdir()  # resumed there from a URL, which has the id alone
    (far / "mlflow_id").write_text(found.info.run_id)
    log(spec.build(far, "mine", CONFIG, 3), row(4))
    assert (far / "mlflow_id").read_text() == mlflow_run(far)[1].info.run_id != found.info.run_id
