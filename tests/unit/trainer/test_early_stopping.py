"""Early end of a run: by the patience of a metric, and by the file `prune` of a sweeper."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers.ranks import Ranks
from helpers.runs import VIT, events, rows, small, tensors

from clipx.distributed.comm import Comm
from clipx.trainer.early_stopping import EarlyStopping, EarlyStoppingSpec, Ending, Improvement, early_end
from clipx.trainer.trainer import Trainer

ALONE = Comm(0, 1, 0, torch.device("cpu"))
METRIC = "eval/retrieval/image_to_text/recall@1"
NAN = math.nan
# A run whose metric does not change: it ends after the third of its evaluations, at step 6 of 20.
CONSTANT = (
    *VIT,  # without BatchNorm, whose averages change
    *("duration=20st", "evaluator=[retrieval]", "evaluator.retrieval.every=2st", "checkpoint.every=2st"),
    *("checkpoint.keep_last=9", "optimizer.lr=1e-12", "optimizer.weight_decay=0", "early_stopping.patience=2"),
    f"early_stopping.metric={METRIC}",
)


@pytest.mark.parametrize(
    ("options", "values", "ends"),
    [
        ({}, [0.1, 0.2, 0.2, 0.1, 0.2], 5),
        ({}, [0.3, None, 0.2, None, 0.2, None, 0.2], 7),  # steps without this evaluation do not count
        ({"min_delta": 0.1}, [0.1, 0.15, 0.19, 0.2], 4),
        ({"min_delta": 0.1}, [0.1, 0.15, 0.19, 0.21], None),
        ({"mode": Improvement.min}, [5.0, 4.0, 3.0, 2.0], None),
        ({"mode": Improvement.min}, [2.0, 3.0, 4.0, 5.0], 4),
        ({}, [NAN, NAN, NAN], 3),
        ({}, [0.1, math.inf, NAN, -math.inf], 4),
    ],
)
def test_a_run_ends_when_its_patience_does(
    tmp_path: Path, options: dict[str, object], values: list[float | None], ends: int | None
) -> None:
    stopping = EarlyStopping(EarlyStoppingSpec(metric=METRIC, **options), tmp_path, ALONE)  # type: ignore[arg-type]
    stopped = [stopping.ends_after({} if value is None else {METRIC: value}, False) for value in values]
    assert stopped == [ends is not None and number >= ends for number in range(1, len(values) + 1)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float], str]:
    """Returns a run that ended early, its last metrics, and what it printed."""
    run_dir = tmp_path_factory.mktemp("early") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        final = Trainer(small(run_dir, *CONSTANT, "report=true")).fit()
    return run_dir, final, printed.getvalue()


def test_the_run_evaluates_once_saves_and_reports_at_its_early_end(ended: tuple[Path, dict[str, float], str]) -> None:
    run_dir, final, printed = ended
    assert [row["step"] for row in rows(run_dir) if METRIC in row] == [2, 4, 6]
    assert final[METRIC] == rows(run_dir)[-1][METRIC]
    assert (run_dir / "checkpoints/step-00000006").is_dir()
    assert (run_dir / "report.html").is_file()
    message = f"no improvement on {final[METRIC]:.6g} of {METRIC} in 2 evaluations"
    found = {event["event"]: event for event in events(run_dir)}
    assert [found["early_stopped"][key] for key in ("step", "ending", "message")] == [6, "patience", message]
    assert f"stopped early after step 6: {message}\n" in printed
    assert early_end(run_dir) == (Ending.patience, message)


@pytest.mark.parametrize("last", [4, 6])
def test_a_resumed_run_ends_at_the_same_step(
    ended: tuple[Path, dict[str, float], str], tmp_path: Path, last: int
) -> None:
    """`last`: the last checkpoint that a kill left. With more patience the ended run continues."""
    copy = tmp_path / "run"
    shutil.copytree(ended[0], copy)
    for step in range(last + 2, 7, 2):
        shutil.rmtree(copy / f"checkpoints/step-{step:08d}")
    trainer = Trainer(small(copy, *CONSTANT, "resume=auto"))
    assert trainer.steps_done == last
    trainer.fit()
    assert trainer.steps_done == 6
    straight, resumed = tensors(ended[0], 6), tensors(copy, 6)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    if last == 6:
        more = Trainer(small(copy, *CONSTANT, "resume=auto", "early_stopping.patience=3"))
        more.fit()
        assert more.steps_done == 8


def train(run_dir: Path, *words: str) -> None:
    Trainer(small(run_dir, *CONSTANT, *words)).fit()


@pytest.mark.slow
def test_all_ranks_end_after_the_same_step(tmp_path: Path, two_ranks: Ranks) -> None:
    run_dir = tmp_path / "two"
    two_ranks.call(train, run_dir)
    assert [row["step"] for row in rows(run_dir) if METRIC in row] == [2, 4, 6]
    state = json.loads((run_dir / "checkpoints/step-00000006/state.json").read_text())["state"]
    assert state["early_stopping"]["waited"] == 2
    (run_dir / "prune").write_text("by hand")
    two_ranks.call(train, run_dir, "resume=auto", "early_stopping.patience=8")
    assert early_end(run_dir) == (Ending.pruned, "by hand")


def test_a_run_resumed_with_another_metric_starts_to_wait_again(tmp_path: Path) -> None:
    first = EarlyStopping(EarlyStoppingSpec(metric=METRIC, patience=2), tmp_path, ALONE)
    assert not any(first.ends_after({METRIC: value}, False) for value in (0.2, 0.1))
    other = METRIC.replace("image_to_text", "text_to_image")
    for metric, ends in ((METRIC, True), (other, False)):
        resumed = EarlyStopping(EarlyStoppingSpec(metric=metric, patience=2), tmp_path, ALONE)
        resumed.restore(first.state())
        assert resumed.ends_after({metric: 0.1}, False) == ends
