"""Early end of a run: by the patience of a metric, and by the file `prune` of a sweeper."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers.runs import SMALL, VIT, compose, events, rows, small, tensors, torchrun

from clipx.distributed.comm import Comm
from clipx.errors import ConfigError
from clipx.trainer.early_stopping import EarlyStopping, EarlyStoppingSpec, Ending, Mode, early_end
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
        ({}, [0.1, 0.2, 0.2, 0.1, 0.3, 0.3, 0.3], None),
        ({}, [0.3, None, 0.2, None, 0.2, None, 0.2], 7),  # steps without this evaluation do not count
        ({"patience": 1}, [0.1, 0.1], 2),
        ({"min_delta": 0.1}, [0.1, 0.15, 0.19, 0.2], 4),
        ({"min_delta": 0.1}, [0.1, 0.15, 0.19, 0.21], None),
        ({"mode": Mode.min}, [5.0, 4.0, 3.0, 2.0], None),
        ({"mode": Mode.min}, [2.0, 3.0, 4.0, 5.0], 4),
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


def test_the_run_evaluates_once_saves_and_reports_at_its_early_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = Trainer(small(tmp_path / "run", *CONSTANT, "report=true")).fit()
    evaluated = [row["step"] for row in rows(tmp_path / "run") if METRIC in row]
    assert evaluated == [2, 4, 6]
    assert final[METRIC] == rows(tmp_path / "run")[-1][METRIC]
    assert (tmp_path / "run/checkpoints/step-00000006").is_dir()
    assert (tmp_path / "run/report.html").is_file()
    message = f"no improvement on {final[METRIC]:.6g} of {METRIC} in 2 evaluations"
    found = {event["event"]: event for event in events(tmp_path / "run")}
    assert [found["early_stopped"][key] for key in ("step", "ending", "message")] == [6, "patience", message]
    assert f"stopped early after step 6: {message}\n" in capsys.readouterr().out
    assert early_end(tmp_path / "run") == (Ending.patience, message)


def test_a_resumed_run_ends_at_the_same_step(tmp_path: Path) -> None:
    Trainer(small(tmp_path / "straight", *CONSTANT)).fit()
    for last in (4, 6):  # the last checkpoint that a kill left
        copy = tmp_path / f"resumed-{last}"
        shutil.copytree(tmp_path / "straight", copy)
        for step in range(last + 2, 7, 2):
            shutil.rmtree(copy / f"checkpoints/step-{step:08d}")
        trainer = Trainer(small(copy, *CONSTANT, "resume=auto"))
        assert trainer.steps_done == last
        trainer.fit()
        assert trainer.steps_done == 6
        straight, resumed = tensors(tmp_path / "straight", 6), tensors(copy, 6)
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    # With more patience the ended run continues.
    more = Trainer(small(tmp_path / "straight", *CONSTANT, "resume=auto", "early_stopping.patience=4"))
    more.fit()
    assert more.steps_done == 10


def test_a_run_resumed_with_another_metric_starts_to_wait_again(tmp_path: Path) -> None:
    first = EarlyStopping(EarlyStoppingSpec(metric=METRIC, patience=2), tmp_path, ALONE)
    assert not any(first.ends_after({METRIC: value}, False) for value in (0.2, 0.1))
    other = METRIC.replace("image_to_text", "text_to_image")
    for metric, ends in ((METRIC, True), (other, False)):
        resumed = EarlyStopping(EarlyStoppingSpec(metric=metric, patience=2), tmp_path, ALONE)
        resumed.restore(first.state())
        assert resumed.ends_after({metric: 0.1}, False) == ends


def test_the_file_prune_ends_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (*VIT, "evaluator=[retrieval]", "evaluator.retrieval.every=end")
    Trainer(small(tmp_path, *common, "duration=2st")).fit()
    (tmp_path / "prune").write_text("worse than\nthe median \x1b[0m")
    longer = Trainer(small(tmp_path, *common, "duration=8st", "resume=auto"))
    longer.fit()
    assert longer.steps_done == 2
    assert early_end(tmp_path) == (Ending.pruned, "worse than the median \x1b[0m")
    assert "pruned after step 2: worse than the median \\x1b[0m\n" in capsys.readouterr().out
    (tmp_path / "prune").unlink()
    without = Trainer(small(tmp_path, *common, "duration=8st", "resume=auto"))
    without.fit()
    assert without.steps_done == 8
    assert early_end(tmp_path) == (None, "")


@pytest.mark.slow
def test_all_ranks_end_after_the_same_step(tmp_path: Path) -> None:
    typed = (*CONSTANT, f"run_dir={tmp_path}/two", "name=two")
    torchrun(2, "-m", "clipx.train", *SMALL, *typed)
    assert [row["step"] for row in rows(tmp_path / "two") if METRIC in row] == [2, 4, 6]
    state = json.loads((tmp_path / "two/checkpoints/step-00000006/state.json").read_text())["state"]
    assert state["early_stopping"]["waited"] == 2
    (tmp_path / "two/prune").write_text("by hand")
    torchrun(2, "-m", "clipx.train", *SMALL, *typed, "resume=auto", "early_stopping.patience=8")
    assert early_end(tmp_path / "two") == (Ending.pruned, "by hand")


def test_the_prefix_of_a_metric_may_be_omitted() -> None:
    assert compose("early_stopping.metric=zeroshot/top1").early_stopping.metric == "eval/zeroshot/top1"


def test_a_metric_that_the_data_does_not_have_is_refused_at_its_evaluation(tmp_path: Path) -> None:
    stopping = EarlyStopping(EarlyStoppingSpec(metric="eval/zeroshot/nature/top1"), tmp_path, ALONE)
    with pytest.raises(ConfigError, match=r"^early_stopping.metric=eval/zeroshot/nature/top1 is not a metric of this "):
        stopping.ends_after({"eval/zeroshot/top1": 0.5}, False)
