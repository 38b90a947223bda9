"""Whole runs: the curve of training, runs that end by an error, random number generators, options of the group debug."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.runs import VIT, compose, events, rows, small, tensors

from clipx.checkpoint.resume import step_of
from clipx.data.loader import LoaderOptions, positions_of
from clipx.errors import ClipxError, Locked
from clipx.trainer.rng import rng_state, set_rng_state
from clipx.trainer.trainer import Trainer


def test_losses_match_the_golden_curve(tmp_path: Path) -> None:
    """Compares the losses of the first twenty steps.

    Rounding on other CPUs and threads moves them by 0.2 %. A larger change is a change of the numerics: give the reason
    in the commit.
    """
    Trainer(small(tmp_path, "duration=20st", "data.samples=250", "+model.image.options.drop_path_rate=0.2")).fit()
    golden = json.loads(Path(__file__).with_name("golden_curve.json").read_text())
    assert [r["train/loss"] for r in rows(tmp_path) if "train/loss" in r] == pytest.approx(golden, rel=1e-2)


def test_a_run_whose_directory_another_job_took_over_ends_after_its_step(tmp_path: Path) -> None:
    trainer = Trainer(small(tmp_path / "run", *VIT, "checkpoint.every=1st"))
    trainer.run.lock._lost = True  # as its thread found
    with pytest.raises(Locked, match=r"run\.lock was taken over by another job"):
        trainer.fit()
    assert trainer.steps_done == 1
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")) == []


def test_a_nonfinite_gradient_of_a_finite_loss_changes_no_state(tmp_path: Path) -> None:
    trainer = Trainer(small(tmp_path / "overflow", *VIT, "objective=fastclip_v1"))
    weight = trainer.learner.model.text.token_embedding.weight
    weight.register_hook(lambda gradient: gradient * torch.inf)
    before = weight.detach().clone()
    with pytest.raises(ClipxError, match="the gradient is not finite at step 0: lower"):
        trainer.fit()
    assert torch.equal(weight, before)
    assert trainer.learner.objective.table.rows.isnan().all()  # type: ignore[union-attr]
    for state in trainer.learner.optimizer.state.values():  # as at the start: moments and number of steps are 0
        assert state and not any(value.any() for value in state.values())


def test_clipping_bounds_the_gradient_and_logs_the_norm_before_clipping(tmp_path: Path) -> None:
    trainer = Trainer(small(tmp_path, "optimizer.clip_norm=0.01"))
    seen = []
    step = trainer.learner.optimizer.step

    def watched(*args: object) -> None:
        grads = [p.grad for group in trainer.learner.optimizer.param_groups for p in group["params"]]
        seen.append(torch.nn.utils.get_total_norm([g for g in grads if g is not None]).item())
        step()

    trainer.learner.optimizer.step = watched  # type: ignore[method-assign]
    metrics = trainer.step(next(trainer.batches()))
    assert metrics["grad_norm"].item() > 0.1
    assert seen == pytest.approx([0.01], rel=1e-3)


def draw() -> tuple[float, float, float, list[float]]:
    return random.random(), random.gauss(0, 1), float(np.random.normal()), torch.rand(3).tolist()  # noqa: NPY002


def test_every_generator_continues_from_the_restored_state() -> None:
    draw()
    state = rng_state(torch.device("cpu")).clone()
    random.gauss(0, 1)  # caches a second number every other time
    assert len(rng_state(torch.device("cpu"))) == len(state)
    set_rng_state(state, torch.device("cpu"))
    assert state.dtype == torch.uint8
    expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert draw() != expected[0]
    set_rng_state(state, torch.device("cpu"))
    assert [draw(), draw()] == expected


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_repeats_the_same_batch_on_each_rank(world: int) -> None:
    def read(first: int, rank: int) -> list[range]:
        return list(positions_of(range(first, 96), LoaderOptions(32, rank, world, repeat=True)))

    for rank in range(world):
        assert set(read(32, rank)) == set(read(0, rank)) == {range(rank * 32 // world, (rank + 1) * 32 // world)}


def test_fast_evaluates_saves_and_logs_in_ten_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fewer = ("data.samples=256", "data.held_out_samples=48", "data.workers=0", "data.batch_size=16")
    Trainer(compose("debug=fast", *VIT, *fewer, f"run_dir={run}")).fit()
    logged = rows(run)
    assert [row["step"] for row in logged if "train/loss" in row] == list(range(1, 11))
    assert any("eval/zeroshot/top1" in row and "eval/retrieval/image_to_text/recall@1" in row for row in logged)
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-00000005", "step-00000010"]
    assert list((run / "tensorboard").iterdir()) and (run / "report.html").is_file()


def test_a_run_that_diverges_is_never_saved_and_has_its_error_and_a_report(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    diverges = ("optimizer.lr=1e30", "duration=20st", "log_every=1st", "checkpoint.every=1st")
    trainer = Trainer(small(run_dir, *VIT, "report=true", *diverges))
    with pytest.raises(ClipxError, match="the embeddings of rank 0 are not finite at step 1: lower optimizer.lr"):
        trainer.fit()
    for folder in (run_dir / "checkpoints").glob("step-*"):
        saved = tensors(run_dir, step_of(folder))
        assert [n for n, t in saved.items() if n.startswith("model/") and not t.isfinite().all()] == [], folder
    (failed,) = (event for event in events(run_dir) if event["event"] == "failed")
    assert failed["message"].startswith("the embeddings of rank 0 are not finite at step 1")
    page = (run_dir / "report.html").read_text()
    assert '<p class="state">Failed after step 2: the embeddings of rank 0 are not finite' in page
