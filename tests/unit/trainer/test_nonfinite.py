"""Batches with non-finite gradients: the run stops, skips the batch, or rolls back, and no state is changed by it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.cases import slow_except
from helpers.runs import VIT, events, interrupt, rows, small, torchrun

from clipx.checkpoint.state import add_prefix
from clipx.checkpoint.tensors import RankRows
from clipx.errors import ClipxError
from clipx.trainer.trainer import Trainer


def poisoned(trainer: Trainer, *steps: int) -> Trainer:
    """Replaces the pixels of these steps' batches by NaN at the input of the model, like an overflow."""

    def poison(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        image, *rest = inputs
        if trainer.steps_done not in steps:
            return inputs
        return (torch.full_like(image, torch.nan, dtype=torch.float32), *rest)

    trainer.learner.model.image.register_forward_pre_hook(poison)
    return trainer


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    learner = trainer.learner
    average = {} if learner.average is None else add_prefix("average", learner.average.state())
    found = {**learner.model.state_dict(), **learner.objective.state_dict(), **average}
    return {name: value.clone() for name, value in found.items()}


def watched(trainer: Trainer) -> dict[int, dict[str, torch.Tensor]]:
    """Returns a dictionary that the run fills with the state before each step, by its number."""
    before: dict[int, dict[str, torch.Tensor]] = {}
    step = trainer.step

    def watch(batch):
        before[trainer.steps_done] = state(trainer)
        return step(batch)

    trainer.step = watch  # type: ignore[method-assign]
    return before


def test_skip_drops_the_batch_without_changing_state(tmp_path: Path) -> None:
    spec = small(tmp_path / "run", "optimizer.non_finite=skip", "optimizer.ema_decay=0.9")
    trainer = poisoned(Trainer(spec), 2)  # after the first step the average equals the weights
    before = watched(trainer)
    trainer.fit()
    assert trainer.steps_done == 4
    assert all(torch.equal(before[2][name], before[3][name]) for name in before[2]), (
        "BatchNorm's averages and the average of the weights must not change either"
    )
    assert all(value.isfinite().all() for value in state(trainer).values())
    told = [event for event in events(tmp_path / "run") if event["event"] == "non_finite"]
    assert [(event["step"], event["policy"]) for event in told] == [(2, "skip")]
    assert rows(tmp_path / "run")[-1]["train/left_out_steps"] == 1


POLICIES = {
    "the limit": ("optimizer.non_finite=skip", "optimizer.non_finite_limit=1"),
    "no checkpoint": ("optimizer.non_finite=rollback", "checkpoint.every=end"),
    "rollback": ("optimizer.non_finite=rollback", "checkpoint.every=1st"),
    "skip": ("optimizer.non_finite=skip",),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_nonfinite_step_is_printed_once(tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    steps = [1, 2] if policy == "the limit" else [1]
    trainer = poisoned(Trainer(small(tmp_path / "run", *VIT, *POLICIES[policy])), *steps)
    error = ""
    try:
        trainer.fit()
    except ClipxError as raised:  # the command prints it
        error = str(raised)
    shown = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert ["\n".join([*shown, error]).count(f"not finite at step {step}") for step in steps] == [1] * len(steps)
    assert bool(error) == (policy not in ("rollback", "skip"))
    assert [event["step"] for event in events(tmp_path / "run") if event["event"] == "non_finite"] == steps


def test_too_many_nonfinite_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    overrides = (*VIT, "optimizer.non_finite=skip", "optimizer.non_finite_limit=2", "duration=8st")
    trainer = poisoned(Trainer(small(tmp_path / "run", *overrides)), 1, 3, 4, 5)
    with pytest.raises(ClipxError, match=r"at step 5, the last of 3 in a row, more than optimizer.non_finite_limit=2"):
        trainer.fit()


def test_counts_of_nonfinite_steps_are_restored_at_resume(tmp_path: Path) -> None:
    skip = ("optimizer.non_finite=skip", "optimizer.non_finite_limit=2", "checkpoint.every=1st")
    overrides = (*VIT, *skip, "duration=8st")
    interrupt(poisoned(Trainer(small(tmp_path / "run", *overrides)), 1, 2), 3)
    again = poisoned(Trainer(small(tmp_path / "run", *overrides, "resume=auto")), 3)
    assert (again.learner.non_finite.total, again.learner.non_finite.consecutive) == (2, 2)
    with pytest.raises(ClipxError, match="at step 3, the last of 3 in a row"):
        again.fit()


def test_rollback_continues_with_the_weights_of_the_last_checkpoint(tmp_path: Path) -> None:
    overrides = (*VIT, "optimizer.non_finite=rollback", "checkpoint.every=2st", "duration=5st", "data.workers=0")
    trainer = poisoned(Trainer(small(tmp_path / "run", *overrides)), 3)
    before = watched(trainer)
    trainer.fit()
    assert any(not torch.equal(before[2][name], before[3][name]) for name in before[2])
    assert all(torch.equal(before[2][name], before[4][name]) for name in before[2]), (
        "the weights of step 2 must be restored after step 3"
    )
    assert trainer.steps_done == 5
    assert "rolled_back" in [event["event"] for event in events(tmp_path / "run")]


@pytest.mark.parametrize(
    ("policy", "optimizer"), [("skip", "adamw"), pytest.param("rollback", "adamw", marks=pytest.mark.slow)]
)
def test_reading_the_decision_a_step_later_changes_nothing(tmp_path: Path, policy: str, optimizer: str) -> None:
    """A log after each step reads it at once. Without a log it is read in the next step, here of index 3 and 5."""
    options = (
        *("objective=fastclip_v3", "objective.rho=2", f"optimizer={optimizer}", f"optimizer.non_finite={policy}"),
        *("optimizer.ema_decay=0.9", "checkpoint.every=2st", "checkpoint.keep_last=9", "duration=7st"),
    )
    found = []
    for period in ("1st", "100st"):
        run_dir = tmp_path / period
        trainer = poisoned(Trainer(small(run_dir, *options, f"log_every={period}")), 2, 4, 5)
        trainer.fit()
        assert [event["step"] for event in events(run_dir) if event["event"] == "non_finite"] == [2, 4, 5]
        found.append(trainer.learner.state.capture())
    at_once, later = found
    assert len([name for name in at_once if name.startswith(("average/", "optimizer/", "table/"))]) > 3
    for name, value in at_once.items():
        one, other = (x.tensor if isinstance(x, RankRows) else x for x in (value, later[name]))
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), name


def test_stop_ends_the_run_before_any_state_changes(tmp_path: Path) -> None:
    trainer = poisoned(Trainer(small(tmp_path / "run", *VIT, "checkpoint.every=1st")), 2)
    with pytest.raises(ClipxError, match="not finite at step 2: lower optimizer.lr.*the last checkpoint is older"):
        trainer.fit()
    assert all(p.isfinite().all() for p in trainer.learner.model.parameters())
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("policy", slow_except(["skip", "rollback"], "skip"))
def test_all_ranks_skip_a_step_that_is_nonfinite_on_one_rank(tmp_path: Path, policy: str) -> None:
    torchrun(2, str(SCRIPTS / "nonfinite_rank.py"), str(tmp_path), policy)
    told = [json.loads((tmp_path / f"{policy}.{rank}.json").read_text()) for rank in range(2)]
    assert told[0] == told[1]
    assert told[0]["finite"]
    assert (told[0]["left out"], told[0]["steps"]) == (1, 4)
    (event,) = [event for event in events(tmp_path / policy) if event["event"] == "non_finite"]
    assert "the embeddings of rank 1 are not finite at step 1" in str(event["message"])
