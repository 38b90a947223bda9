"""Runs at a URL: every command that takes a run reads the same as from its directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from helpers.cases import slow_except
from helpers.runs import VIT, compose, small
from safetensors import safe_open

from clipx.errors import CheckpointError, ConfigError
from clipx.evaluate import evaluate
from clipx.export import export
from clipx.extra.check.command import check
from clipx.extra.embed.command import embed
from clipx.trainer.saved_run import find_runs, open_run
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_weights

URL = "memory://bucket/runs/mine"
EXPECTATION = """overrides: [data=shapes]
metrics:
  eval/zeroshot/top1: {value: 0.0, source: a test}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("saved") / "mine"
    Trainer(small(run_dir, *VIT, "checkpoint.every=2st", "evaluator=[zeroshot]")).fit()
    return run_dir


@pytest.fixture
def far(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run in a storage without a local path, and a copy of its directory; the cache is empty."""
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "mine")
    storage = fsspec.filesystem("memory")
    storage.put(str(trained), URL, recursive=True)
    yield tmp_path / "mine"
    storage.rm("memory://bucket", recursive=True)


def call(command: str, *words: str) -> None:
    task = {"evaluate": evaluate, "export": export, "embed": embed, "check": check}[command]
    task(compose(*words, config_name=command))  # type: ignore[arg-type]


def metrics(path: Path) -> dict[str, float]:
    return {key: value for key, value in json.loads(path.read_text()).items() if key.startswith("eval/")}


@pytest.mark.parametrize("end", slow_except(["", "/checkpoints/step-00000002"], "/checkpoints/step-00000002"))
def test_a_run_at_a_url_is_evaluated_exported_and_embedded_as_its_directory(far: Path, end: str) -> None:
    step = 2 if end else 4
    call("evaluate", f"run=mine{end}")
    call("evaluate", f"run={URL}{end}")
    found = metrics(Path(f"outputs/evaluations/mine/evaluation-shapes-step-{step}.json"))
    assert found and found == metrics(far / f"evaluation-shapes-step-{step}.json")
    for run, name in ((f"mine{end}", "near"), (f"{URL}{end}", "far")):
        call("export", f"run={run}", "format=safetensors", f"out={name}.safetensors")
        call("embed", f"run={run}", f"out={name}")
    with safe_open("near.safetensors", "pt") as local, safe_open("far.safetensors", "pt") as file:
        assert file.metadata() == local.metadata() and json.loads(file.metadata()["clipx"])["step"] == step
        assert set(file.keys()) == set(local.keys())
        assert all(file.get_tensor(name).equal(local.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    near, from_url = ({p.name: p.read_bytes() for p in Path(name).rglob("*.npy")} for name in ("near", "far"))
    assert near and near == from_url
    assert not list(Path().glob("memory*")), "a folder that is named by the URL"


def test_all_steps_and_folders_of_runs_at_a_url(far: Path) -> None:
    for run in (URL, f"{URL}/checkpoints"):
        call("evaluate", f"run={run}", "step=all")
    found = json.loads(Path("outputs/evaluations/mine/evaluation-shapes.json").read_text())
    assert [model["step"] for model in found["models"]] == [2, 4]
    fsspec.filesystem("memory").put(str(far), "memory://bucket/runs/other", recursive=True)
    assert [run.location for run in find_runs("memory://bucket/runs")] == [
        "memory://bucket/runs/mine",
        "memory://bucket/runs/other",
    ]
    assert find_runs("memory://bucket/runs/nothing") == []


def test_check_reads_the_metrics_at_a_url(far: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("e.yaml").write_text(EXPECTATION)
    printed = []
    for run in ("mine", URL):
        call("check", f"run={run}", "expected=e.yaml", "tolerance=1")
        printed.append(capsys.readouterr().out)
    assert "within" in printed[0] and printed[0] == printed[1]


def test_a_checkpoint_that_the_run_has_replaced_is_downloaded_again(far: Path) -> None:
    """And the newest is the newest at the URL, not that of the cache."""
    before = open_run(URL).load()
    assert before is not None and before.step == 4
    Trainer(small(far, *VIT, "checkpoint.every=2st", "resume=step:2", "optimizer.lr=0.1")).fit()
    storage = fsspec.filesystem("memory")
    storage.put(f"{far}/checkpoints/step-00000004", f"{URL}/checkpoints", recursive=True)
    again, local = open_run(URL).load(), open_run("mine").load()
    assert again is not None and local is not None and again.step == 4
    name = "model/text.positional_embedding"
    assert again.tensors[name].equal(local.tensors[name]) and not again.tensors[name].equal(before.tensors[name])
    storage.rm(f"{URL}/checkpoints/step-00000004", recursive=True)
    found = open_run(URL).load()
    assert found is not None and found.step == 2
    assert open_run(URL).steps() == [2]


def test_of_a_run_at_a_url_with_a_damaged_checkpoint_the_previous_one_is_loaded(
    far: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fsspec.filesystem("memory").pipe_file(f"{URL}/checkpoints/step-00000004/state.json", b"{}")
    found = open_run(URL).load()
    assert found is not None and found.step == 2
    assert "step-00000004 is damaged: the hash of state.json does not match: falling back" in capsys.readouterr().err
    assert load_weights(URL).model.keys() == load_weights("mine").model.keys()
    with pytest.raises(CheckpointError, match="step-00000004 is damaged"):
        open_run(URL).load(4)


def test_overrides_of_a_runs_keys_change_its_configuration(far: Path) -> None:
    changed = open_run(URL, changes=["data.workers=1", "evaluator.zeroshot.every=end", "precision=fp64"]).spec
    assert (changed.data.workers, changed.evaluator["zeroshot"].every, changed.precision.kind) == ("1", "end", "fp64")
    assert changed.data.batch_size == 32 and changed.name == "mine"
    with pytest.raises(ConfigError, match=r"data\.nothing is not a key here"):
        open_run(URL, changes=["data.nothing=1"])


def test_a_relative_checkpoint_in_the_working_directory(far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(far)
    run = open_run("checkpoints/step-00000002")
    assert (run.location, run.step, run.spec.name) == (".", 2, "mine")
    with pytest.raises(ConfigError, match="step=4 has no effect on run="):
        run.the_step(4)
    assert run.folder.samefile(far)
