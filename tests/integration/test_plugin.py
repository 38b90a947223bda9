"""A user-defined objective in two files outside the package, as documented in docs/extend/objective.md."""

from __future__ import annotations

import contextlib
import json
import pickle
import shlex
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest
import torch
import yaml
from helpers import PLUGINS
from helpers.documentation import files
from helpers.ranks import Ranks
from helpers.runs import SMALL, VIT, events, losses, rows, run

from clipx import evaluate, train
from clipx.config.duration import Length
from clipx.config.saved import from_dict, to_dict
from clipx.config.typed import last_of_each
from clipx.distributed.comm import Comm
from clipx.errors import ConfigError
from clipx.objective.base import StepInputs
from clipx.trainer.spec import RunSpec, compose
from clipx.trainer.trainer import Trainer

FOLDER = PLUGINS / "hinge"
PAGE = "docs/extend/objective.md"
ONE = Comm(0, 1, 0, torch.device("cpu"))


def test_the_page_shows_the_plugins_files() -> None:
    shown = {path: FOLDER / Path(path).relative_to("mine") for path in files(PAGE)}
    assert [path.name for path in shown.values()] == ["hinge.py", "hinge.yaml"]
    for path, content in files(PAGE).items():
        assert content == shown[path].read_text(encoding="utf-8"), path


def test_the_help_of_the_plugins_key_is_its_docstring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", f"--config-dir={FOLDER}", "objective=hinge", "--help", "objective.margin"]
    monkeypatch.setattr("sys.argv", words)
    with contextlib.suppress(SystemExit):
        train.main()
    printed = " ".join(capsys.readouterr().out.split())
    assert "Margin in cosine similarity by which the matching pair must exceed all others." in printed


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


def test_a_run_of_the_plugin_requires_its_config_dir(tmp_path: Path) -> None:
    values = to_dict(compose("objective=hinge", config_dir=FOLDER))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    done = run(sys.executable, "-m", "clipx.evaluate", f"run={tmp_path}", check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: objective.kind=hinge is not registered: choose one of ")
    assert done.stderr.endswith("sogclr, or give a plug-in's folder by --config-dir\n")


def trained(run_dir: Path) -> list[float]:
    options = (*SMALL, *VIT, "objective=hinge", "precision=fp64", "checkpoint=none", "duration=3st")
    Trainer(compose(*options, f"run_dir={run_dir}", config_dir=FOLDER)).fit()
    return losses(run_dir)


def test_two_ranks_match_a_single_process(tmp_path: Path, two_ranks: Ranks) -> None:
    two, _ = two_ranks.call(trained, tmp_path / "two")
    assert two == pytest.approx(trained(tmp_path / "one"), rel=1e-9)


def test_the_plugin_composes_from_python() -> None:
    spec = compose("objective=hinge", "objective.margin=0.1", config_dir=FOLDER)
    assert to_dict(spec)["objective"] == {"kind": "hinge", "margin": 0.1}
    assert from_dict(RunSpec, to_dict(spec)) == spec


def test_the_plugins_options_are_validated_and_listed() -> None:
    with pytest.raises(ConfigError, match=r"^objective\.margin=0\.0 must be above 0"):
        compose("objective=hinge", "objective.margin=0", config_dir=FOLDER)
    with pytest.raises(ConfigError, match=r"^objective\.margni is not a key here: the keys are margin \(did you mean"):
        compose("objective=hinge", "objective.margni=1", config_dir=FOLDER)
    with pytest.raises(ConfigError, match=r"choose one of .*dcl.* hinge, infonce.*\(did you mean hinge\?\)$"):
        compose("objective=hnige", config_dir=FOLDER)


def test_compiling_an_objective_without_tiles_is_rejected() -> None:
    """Hinge declares no tiles, so there is nothing to compile."""
    with pytest.raises(
        ConfigError, match=r"^compile\.objective=true has no effect on objective=hinge, which has no tiles"
    ):
        compose("objective=hinge", "compile.objective=true", config_dir=FOLDER)
    with pytest.raises(
        ConfigError, match="compile.objective=true has no effect on Hinge, which has no tiles to compile"
    ):
        compose("objective=hinge", config_dir=FOLDER).objective.build(ONE, Length(100, 6)).compile_tiles(lambda f: f)


def test_hinge_loss_and_gradient_equal_their_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.nn.functional.normalize(torch.randn(2, 6, 5, dtype=torch.float64, generator=generator), dim=-1)
    x.requires_grad_(), y.requires_grad_()
    objective = compose("objective=hinge", config_dir=FOLDER).objective.build(ONE, Length(100, 6))
    loss, metrics = objective(StepInputs(x, y, torch.arange(6)))
    expected = torch.zeros((), dtype=torch.float64)
    violated = 0
    for i in range(6):
        for j in range(6):
            if i != j:
                of_image = (0.2 + x[i] @ y[j] - x[i] @ y[i]).clamp(min=0)
                violated += int(of_image > 0)
                expected = expected + of_image + (0.2 + x[j] @ y[i] - x[i] @ y[i]).clamp(min=0)
    torch.testing.assert_close(loss, expected / 6, rtol=1e-12, atol=0)
    assert metrics["violations"].item() == pytest.approx(violated / 36)
    for mine, theirs in zip(torch.autograd.grad(loss, (x, y)), torch.autograd.grad(expected / 6, (x, y)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_other_processes_of_a_run_import_the_plugins_module() -> None:
    """Spawned loader workers, and jobs on other machines, import it by the name in the environment."""
    spec = pickle.dumps(compose("objective=hinge", config_dir=FOLDER).objective)
    load = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    done = subprocess.run([sys.executable, "-c", load], input=spec, capture_output=True, check=True)
    assert b"HingeSpec(kind='hinge', margin=0.2)" in done.stdout


def test_two_plugin_folders_can_use_the_same_names(tmp_path: Path) -> None:
    (tmp_path / "objective").mkdir()
    source = (FOLDER / "objective" / "hinge.py").read_text()
    (tmp_path / "objective" / "hinge.py").write_text(source.replace("margin: float = 0.2", "margin: float = 0.5"))
    (tmp_path / "objective" / "hinge.yaml").write_text("defaults: [/schema/objective/hinge@_here_]\n")
    for folder, margin in ((FOLDER, 0.2), (tmp_path, 0.5), (FOLDER, 0.2)):
        spec = compose("objective=hinge", config_dir=folder).objective
        assert type(spec)() == spec == type(spec)(margin=margin)  # type: ignore[call-arg]
