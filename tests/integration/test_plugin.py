"""A user-defined objective in two files outside the package, as documented in docs/extend/objective.md."""

from __future__ import annotations

import json
import shlex
import sys
from html import escape
from pathlib import Path

import pytest
import yaml
from helpers import PLUGINS
from helpers.cases import slow_except
from helpers.documentation import files
from helpers.ranks import Ranks
from helpers.runs import SMALL, VIT, events, losses, rows, run

from clipx import evaluate
from clipx.config.typed import last_of_each
from clipx.trainer.spec import compose
from clipx.trainer.trainer import Trainer

FOLDER = PLUGINS / "hinge"
PAGE = "docs/extend/objective.md"


def test_the_page_shows_the_plugins_files() -> None:
    shown = {path: PLUGINS / Path(path).stem / Path(path).relative_to("mine") for path in files(PAGE)}
    assert [path.name for path in shown.values()] == ["hinge.py", "hinge.yaml", "words.py", "words.yaml"]
    for path, content in files(PAGE).items():
        assert content == shown[path].read_text(encoding="utf-8"), path


def test_the_plugin_trains_and_evaluates_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = last_of_each([*SMALL, *VIT[2:], "report=true", "evaluator=[zeroshot]", f"run_dir={tmp_path}/run"])
    run(sys.executable, "-m", "clipx.train", f"--config-dir={FOLDER}", "objective=hinge", *options)
    (start,) = [event for event in events(tmp_path / "run") if event["event"] == "start"]
    typed = ["--config-dir", str(FOLDER), "objective=hinge", *options]
    assert shlex.split(start["command"]) == ["python", "-m", "clipx.train", *typed]
    assert escape(start["command"]) in (tmp_path / "run" / "report.html").read_text()
    logged = rows(tmp_path / "run")
    steps = [row for row in logged if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(0 <= row["train/violations"] <= 1 for row in steps)
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["objective"] == {"kind": "hinge", "margin": 0.2}

    words = ["evaluate", "--config-dir", str(FOLDER), f"run={tmp_path}/run"]
    monkeypatch.setattr("sys.argv", words)
    evaluate.main()
    (found,) = (tmp_path / "run").glob("evaluation-*.json")
    (logged_top1,) = [row["eval/zeroshot/top1"] for row in logged if "eval/zeroshot/top1" in row]
    assert json.loads(found.read_text())["eval/zeroshot/top1"] == logged_top1


def trained(run_dir: Path, name: str, micro_batches: int = 1) -> list[float]:
    options = (*SMALL, *VIT, f"objective={name}", "precision=fp64", "checkpoint=none", "duration=3st")
    options = (*options, f"data.micro_batches={micro_batches}", f"run_dir={run_dir}")
    Trainer(compose(*options, config_dir=PLUGINS / name)).fit()
    return losses(run_dir)


@pytest.mark.parametrize("name", slow_except(["hinge", "words"], "hinge"))
def test_two_ranks_in_micro_batches_match_a_single_process(name: str, tmp_path: Path, two_ranks: Ranks) -> None:
    two, _ = two_ranks.call(trained, tmp_path / "two", name, 2)
    assert two == pytest.approx(trained(tmp_path / "one", name), rel=1e-9)


def test_an_objective_that_reads_the_trunk_runs_from_the_command_line(tmp_path: Path) -> None:
    options = last_of_each([*SMALL, *VIT, "duration=2st", f"run_dir={tmp_path}/run"])
    run(sys.executable, "-m", "clipx.train", f"--config-dir={PLUGINS / 'words'}", "objective=words", *options)
    assert all(row["train/words"] > 0 for row in rows(tmp_path / "run") if "train/loss" in row)


def test_two_plugin_folders_can_use_the_same_names(tmp_path: Path) -> None:
    (tmp_path / "objective").mkdir()
    source = (FOLDER / "objective" / "hinge.py").read_text()
    (tmp_path / "objective" / "hinge.py").write_text(
        source.replace("margin: float = option(0.2", "margin: float = option(0.5")
    )
    (tmp_path / "objective" / "hinge.yaml").write_text("defaults: [/schema/objective/hinge@_here_]\n")
    for folder, margin in ((FOLDER, 0.2), (tmp_path, 0.5), (FOLDER, 0.2)):
        spec = compose("objective=hinge", config_dir=folder).objective
        assert type(spec)() == spec == type(spec)(margin=margin)  # type: ignore[call-arg]
