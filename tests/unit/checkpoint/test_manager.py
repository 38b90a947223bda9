"""Checkpoints of a run: their cadence, their retention, and resuming from an earlier step or from a copy at a URL."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers.forks import Fork
from helpers.runs import SMALL, VIT, losses, small, start, tensors, untimed_rows
from helpers.slurm_jobs import held, release
from helpers.waiting import wait_until

import clipx
from clipx.checkpoint.manager import CheckpointManager
from clipx.checkpoint.resume import Resume
from clipx.checkpoint.spec import CheckpointSpec
from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError, Exit
from clipx.trainer.trainer import Trainer

EVERY_STEP = (*VIT, "data.batch_size=8", "duration=6st", "checkpoint.every=1st")


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-????????"))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_keep_every_between_two_saves_keeps_the_next_even_after_a_resume(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    policy = ("checkpoint.every=2st", "checkpoint.keep_last=1", "checkpoint.keep_every=3st")
    Trainer(small(run_dir, *EVERY_STEP, *policy, "duration=2st")).fit()
    Trainer(small(run_dir, *EVERY_STEP, *policy, "duration=6st", "resume=auto")).fit()
    assert steps(run_dir) == [4, 6]
    Trainer(small(run_dir, *EVERY_STEP, *policy, "duration=10st", "resume=auto")).fit()
    assert steps(run_dir) == [4, 6, 10], "4 is the first save after 3, 6 a multiple, and none is after 6 up to 8"


def test_a_resumed_run_knows_its_best_value(tmp_path: Path) -> None:
    def manager() -> CheckpointManager:
        spec, comm = CheckpointSpec(every="end", best="eval/x"), Comm(0, 1, 0, torch.device("cpu"))
        return CheckpointManager(tmp_path, spec, Length(100, 10), comm, lambda *_, **__: None)

    first, resumed = manager(), manager()
    first.open()
    state = {"samples_seen": 10, "world": 1, "data": "", "overdue": [], "non_finite": [0, 0]}
    first.save(1, {"x": torch.ones(1)}, state, {"eval/x": 0.5})
    first.close()
    assert resumed.find(Resume.parse("auto")) is not None
    assert [resumed.is_new_best({"eval/x": value}) for value in (0.4, 0.6)] == [False, True]


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of six steps, `run`, and its upload, `far`."""
    folder = tmp_path_factory.mktemp("uploaded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Trainer(small(Path("run"), *EVERY_STEP, f"checkpoint.remote=file://{folder}/far")).fit()
    return folder


@pytest.fixture
def uploading(uploaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Copies that run and its upload into the current folder. Returns its overrides."""
    shutil.copytree(uploaded, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return (*EVERY_STEP, f"checkpoint.remote=file://{tmp_path}/far")


def test_a_run_resumes_from_its_upload_on_another_machine(tmp_path: Path, uploading: tuple[str, ...]) -> None:
    """And another run starts from the URL of a checkpoint."""
    expected, curve = tensors(Path("run"), 6), losses(Path("run"))
    assert steps(tmp_path / "far" / "run") == steps(Path("run"))[-3:], "one not uploaded in time is deleted only there"
    shutil.rmtree(tmp_path / "far" / "run" / "checkpoints" / "step-00000006")
    shutil.rmtree("run")
    trainer = Trainer(small(Path("run"), *uploading, "resume=auto"))
    assert trainer.steps_done == 5
    trainer.fit()
    assert same(tensors(Path("run"), 6), expected)
    assert losses(Path("run")) == curve
    for end, step in (("", 6), ("/checkpoints/step-00000005", 5)):
        other = Trainer(small(tmp_path / f"from-{step}", *EVERY_STEP, f"resume=file://{tmp_path}/far/run{end}"))
        other.close()
        assert other.steps_done == step


def test_a_run_resumed_from_its_upload_continues_its_runs_in_loggers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    logged = ("logger=[wandb,trackio]", "logger.wandb.mode=offline", "logger.trackio.project=far")
    Trainer(small(Path("run"), *EVERY_STEP, *logged, "duration=2st", f"checkpoint.remote=file://{tmp_path}/far")).fit()
    (first,) = Path("run/wandb").glob("offline-run-*")
    words = (f"resume=file://{tmp_path}/far/run", "run_dir=elsewhere/run")
    Trainer(clipx.compose(*words, "checkpoint.remote=null", "duration=3st")).fit()
    (second,) = Path("elsewhere/run/wandb").glob("offline-run-*")
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2] == Path("run/wandb_id").read_text()
    assert Path("elsewhere/run/trackio_id").read_text() == "run"


@pytest.mark.parametrize("text", ["step:5", "run/checkpoints/step-00000005"])
def test_resuming_an_earlier_step_renames_the_later_checkpoints(
    uploaded: Path, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(uploaded / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for resume in (text, "auto"):
        trainer = Trainer(small(Path("run"), *EVERY_STEP, f"resume={resume}"))
        trainer.close()
        assert trainer.steps_done == 5
    names = {path.name for path in Path("run/checkpoints").iterdir()}
    assert names == {"step-00000004", "step-00000005", "step-00000006.left"}


def test_a_run_that_goes_back_does_not_continue_from_its_later_uploads(uploading: tuple[str, ...]) -> None:
    Trainer(small(Path("run"), *uploading, "duration=5st", "resume=step:4")).fit()
    shutil.rmtree("run")
    trainer = Trainer(small(Path("run"), *uploading, "duration=6st", "resume=auto"))
    trainer.close()
    assert trainer.steps_done == 5


def test_a_new_run_does_not_overwrite_an_upload(uploading: tuple[str, ...]) -> None:
    shutil.rmtree("run")
    with pytest.raises(CheckpointError, match=r"/far/run already holds a run: continue it with resume=auto, or give"):
        Trainer(small(Path("run"), *uploading))


def started(run_dir: Path, *overrides: str) -> Fork:
    return start(run_dir.parent / "out", "-m", "clipx.train", *SMALL, *VIT, *overrides, f"run_dir={run_dir}")


def wait_for_step(run_dir: Path, step: int, process: Fork) -> None:
    """Waits until a run has logged a step."""

    def logged() -> bool:
        assert process.poll() is None, process.err.read_text()
        path = run_dir / "metrics.jsonl"
        return path.is_file() and len(path.read_text().splitlines()) >= step

    wait_until(logged, f"step {step} was not logged")


def test_a_stopped_run_exits_with_75_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    long = ("duration=12st", "evaluator=[retrieval]", "evaluator.retrieval.every=1st")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    Trainer(small(straight, *VIT, *long)).fit()
    hold = held(stopped)
    process = started(stopped, *hold, *long)
    wait_for_step(stopped, 4, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=600)
    assert process.returncode == Exit.REQUEUE == 75, said
    assert "stopped: SIGTERM: stopped after step" in said
    assert "saved; continue with resume=" in said
    release(stopped)
    process = started(stopped, *hold, *long, "resume=auto")
    assert process.wait(timeout=600) == 0
    assert same(tensors(stopped, 12), tensors(straight, 12))
    assert untimed_rows(straight) == untimed_rows(stopped), (
        "the evaluation interrupted by the signal is repeated after the resume"
    )
