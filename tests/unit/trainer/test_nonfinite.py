"""Batches with non-finite gradients: the run stops, skips the batch, or rolls back, and no state is changed by it."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.ranks import Ranks
from helpers.runs import VIT, events, rows, small

from clipx.checkpoint.state import add_prefix
from clipx.checkpoint.tensors import RankRows
from clipx.errors import ClipxError
from clipx.trainer.trainer import Trainer

TINY = ("model.image.size=16", "data.batch_size=8")  # for the default ResNet, whose BatchNorm has averages


def poisoned(trainer: Trainer, *steps: int) -> Trainer:
    """Replaces the pixels of these steps' batches by NaN at the input of the model, like an overflow."""

    def poison(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        image, *rest = inputs
        if trainer.steps_done not in steps:
            return inputs
        return (torch.full_like(image, torch.nan, dtype=trainer.learner.precision.dtype), *rest)

    trainer.learner.model.image.register_forward_pre_hook(poison)
    return trainer


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    learner = trainer.learner
    average = {} if learner.average is None else add_prefix("average", learner.average.state())
    found = {**learner.model.state_dict(), **learner.objective.state_dict(), **average}
    return {name: value.clone() for name, value in found.items()}


def test_skip_drops_the_batch_without_changing_state(tmp_path: Path) -> None:
    spec = small(tmp_path / "run", *TINY, "optimizer.non_finite=skip", "optimizer.ema_decay=0.9")
    trainer = poisoned(Trainer(spec), 2)  # after the first step the average equals the weights
    before, step = dict[int, dict[str, torch.Tensor]](), trainer.step

    def watch(batch):
        before[trainer.steps_done] = state(trainer)
        return step(batch)

    trainer.step = watch  # type: ignore[method-assign]
    trainer.fit()
    assert trainer.steps_done == 4
    same = (torch.equal(before[2][name], before[3][name]) for name in before[2])
    assert all(same), "BatchNorm's averages and the average of the weights must not change either"
    assert all(value.isfinite().all() for value in state(trainer).values())
    told = [event for event in events(tmp_path / "run") if event["event"] == "non_finite"]
    assert [(event["step"], event["policy"]) for event in told] == [(2, "skip")]
    assert rows(tmp_path / "run")[-1]["train/left_out_steps"] == 1


POLICIES: dict[str, tuple[tuple[str, ...], list[int], str]] = {  # options, bad steps, and the error
    "stop": (("checkpoint.every=1st",), [2], r"^.*step 2: lower optimizer.lr.*the last checkpoint is older"),
    "the limit": (
        ("optimizer.non_finite=skip", "optimizer.non_finite_limit=1"),
        [0, 2, 3],
        "at step 3, the last of 2 in a row, more than optimizer.non_finite_limit=1",
    ),
    "no checkpoint": (("optimizer.non_finite=rollback", "checkpoint.every=end"), [1], "at step 1"),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_nonfinite_step_is_printed_once_and_leaves_finite_weights(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    words, bad, message = POLICIES[policy]
    trainer = poisoned(Trainer(small(tmp_path, *VIT, *words)), *bad)
    with pytest.raises(ClipxError, match=message) as raised:  # the command prints it
        trainer.fit()
    shown = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert ["\n".join([*shown, str(raised.value)]).count(f"not finite at step {step}") for step in bad] == [1] * len(
        bad
    )
    assert [event["step"] for event in events(tmp_path) if event["event"] == "non_finite"] == bad
    assert all(p.isfinite().all() for p in trainer.learner.model.parameters())
    if policy == "stop":
        saved = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
        assert saved == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("policy", slow_except(["skip", "rollback"], "skip"))
def test_reading_the_decision_a_step_later_changes_nothing(tmp_path: Path, policy: str) -> None:
    """A log after each step reads it at once. Without a log it is read in the next step, here of index 3 and 5."""
    options = (
        *("objective=fastclip_v3", "objective.rho=2", f"optimizer.non_finite={policy}", *TINY),
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


def train_poisoned(run_dir: Path, policy: str) -> tuple[float, int, int]:
    """Trains with non-finite pixels of rank 1 in the second step. Returns a sum of weights, skipped steps and steps."""
    options = (*VIT, "precision=fp64", "objective=fastclip_v3", "objective.rho=2", "checkpoint.every=1st")
    trainer = Trainer(small(run_dir, *options, f"optimizer.non_finite={policy}"))
    poisoned(trainer, *([1] if trainer.comm.rank == 1 else []))
    trainer.fit()
    weights = sum(p.detach().sum().item() for p in trainer.learner.model.parameters())
    return weights, trainer.learner.non_finite.total, trainer.steps_done


@pytest.mark.parametrize("policy", slow_except(["skip", "rollback"], "skip"))
def test_all_ranks_skip_a_step_that_is_nonfinite_on_one_rank(tmp_path: Path, policy: str, two_ranks: Ranks) -> None:
    one, other = two_ranks.call(train_poisoned, tmp_path / "run", policy)
    assert one == other == (one[0], 1, 4)
    assert math.isfinite(one[0])
    (event,) = [event for event in events(tmp_path / "run") if event["event"] == "non_finite"]
    assert "the embeddings of rank 1 are not finite at step 1" in str(event["message"])
