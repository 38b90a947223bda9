"""Several processes do what one does on the whole batch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import SMALL, VIT, run, torchrun

SCRIPT = str(Path(__file__).with_name("gradients.py"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    out = tmp_path_factory.mktemp("alone") / "gradients.safetensors"
    run(sys.executable, SCRIPT, str(out), "1")
    return load_file(out)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 2), (4, 1)])
def test_loss_and_every_gradient_equal_one_process(
    tmp_path: Path, alone: dict[str, torch.Tensor], ranks: int, micro_batches: int
) -> None:
    """float64, to 1e-10; the loss has its global value on every rank."""
    out = tmp_path / "gradients.safetensors"
    torchrun(ranks, SCRIPT, str(out), str(micro_batches))
    together = load_file(out)
    assert together.keys() == alone.keys()
    assert len(together["losses"]) == ranks
    for name, expected in alone.items():
        torch.testing.assert_close(
            together[name], expected.expand_as(together[name]), rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "one"
    run(sys.executable, "-m", "clipx.train", *SMALL, *VIT, f"run_dir={run_dir}", "precision=fp64")
    return run_dir


def test_training_on_two_ranks_follows_the_same_curve(tmp_path: Path, trained: Path) -> None:
    run_dir = tmp_path / "two"
    torchrun(2, "-m", "clipx.train", *SMALL, *VIT, f"run_dir={run_dir}", "precision=fp64")
    assert len(losses(run_dir)) == 4
    assert losses(run_dir) == pytest.approx(losses(trained), abs=1e-9)


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, trained: Path) -> None:
    """Three steps' worth on one rank, then the fourth on two: the same sample stream, the same curve."""
    run_dir = tmp_path / "elastic"
    spec = [*SMALL, *VIT, f"run_dir={run_dir}", "precision=fp64", "checkpoint.every=2st"]
    run(sys.executable, "-m", "clipx.train", *spec)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000004")  # as if it had been killed after step 2
    done = torchrun(2, "-m", "clipx.train", *spec, "resume=auto")
    assert "resumed  at step 2" in done.stdout
    assert losses(run_dir) == pytest.approx(losses(trained), abs=1e-9)


@pytest.mark.parametrize("batch_size", [7, 256], ids=["several batches a rank", "ranks without a batch"])
def test_evaluation_does_not_depend_on_the_number_of_ranks(trained: Path, batch_size: int) -> None:
    evaluators = ["evaluator=[zeroshot,retrieval]"]
    evaluators += [f"evaluator.{name}.batch_size={batch_size}" for name in ("zeroshot", "retrieval")]
    results = []
    for ranks in (1, 3):
        torchrun(ranks, "-m", "clipx.evaluate", f"run={trained}", *evaluators)
        (path,) = trained.glob("evaluation-*.json")
        results.append(json.loads(path.read_text()))
        path.unlink()
    assert len(results[0]) > 10
    assert results[0] == results[1]


def test_ranks_that_evaluate_agree_on_the_checkpoint_before_a_damaged_one(tmp_path: Path, trained: Path) -> None:
    run_dir = tmp_path / "damaged"
    shutil.copytree(trained, run_dir)
    whole = run_dir / "checkpoints" / "step-00000004"
    shutil.copytree(whole, whole.with_name("step-00000009"))
    (whole.with_name("step-00000009") / "state.json").unlink()
    torchrun(2, "-m", "clipx.evaluate", f"run={run_dir}", "evaluator=[retrieval]")
    assert (run_dir / "evaluation-shapes-step-4.json").is_file()
    assert (run_dir / "checkpoints" / "step-00000009.corrupt").is_dir()


def test_a_batch_that_the_ranks_cannot_share_is_refused_by_name(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "clipx.train", *SMALL, f"run_dir={tmp_path}/x", "data.batch_size=33", check=False)
    assert done.returncode != 0
    assert "data.batch_size=33 is not divisible by 2 ranks: use 32 or 34" in done.stderr


def test_an_error_of_rank_0_is_every_ranks(tmp_path: Path) -> None:
    """A file that is not there ends the run at once; nobody waits for the others."""
    done = torchrun(
        2, "-m", "clipx.train", "data=csv", f"data.path={tmp_path}/none.csv", f"run_dir={tmp_path}/x", "schedule.warmup=1st",
        check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    for rank in (0, 1):
        assert f"error (rank {rank}): data.path={tmp_path}/none.csv cannot be read" in done.stderr
