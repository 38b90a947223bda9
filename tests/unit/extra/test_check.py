"""`clipx.check`: compares a small finished run with expectations that it reaches, misses or does not measure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from helpers.runs import SMALL, compose, rows

import clipx.extra.check.command
from clipx.errors import ClipxError
from clipx.extra.check.command import CheckSpec
from clipx.trainer.trainer import Trainer

TRAINED = (*SMALL, "evaluator=[retrieval]")
METRIC = "eval/retrieval/image_to_text/recall@5"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("check") / "run"
    Trainer(compose(*TRAINED, f"run_dir={run_dir}", "seed=3")).fit()
    return run_dir


@dataclass(frozen=True)
class Checked:
    """Result of a check in this process: the exit code, the output, and the error without its prefix."""

    code: int
    out: str
    error: str


Check = Callable[..., Checked]


@pytest.fixture
def check(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Writes an expectation and checks a run. `metrics`: values of ExpectedMetric by name."""

    def checked(metrics: dict[str, dict[str, object]], **values: object) -> Checked:
        filled = {name: {"source": "Table 1", **metric} for name, metric in metrics.items()}
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({"overrides": list(TRAINED), "metrics": filled, **values}))
        try:
            clipx.extra.check.command.check(CheckSpec(run=str(trained), expected=str(path)))
        except ClipxError as error:
            return Checked(error.exit_code, capsys.readouterr().out, str(error))
        return Checked(0, capsys.readouterr().out, "")

    return checked


def reached(trained: Path, metric: str = METRIC) -> float:
    return rows(trained)[-1][metric]


def cells(out: str, name: str) -> list[str]:
    """Returns the cells of the row of a table that starts with `name`."""
    line = next(line for line in out.splitlines() if re.match(rf"│ {re.escape(name)} ", line))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_run_within_its_expectation_exits_with_0(trained: Path, check: Check) -> None:
    value = reached(trained)
    done = check({METRIC: {"value": value + 0.01, "tolerance": 0.02}})
    assert (done.code, done.error) == (0, "")
    samples = f"{reached(trained, METRIC.replace('recall@5', 'samples')):g}"
    expected = [METRIC, f"{value + 0.01:.4g} ± 0.02", f"{value:.4g}", samples, "within", "metrics.jsonl"]
    assert cells(done.out, METRIC) == expected
    assert " has the configuration of data.samples=256" in done.out, "the seed differs, which is no difference"
    assert f"source of {METRIC}: Table 1" in done.out


def test_better_and_worse_depend_on_the_direction(trained: Path, check: Check) -> None:
    rank = "eval/retrieval/image_to_text/median_rank"
    done = check(
        {
            METRIC: {"value": reached(trained) - 0.01},
            rank: {"value": reached(trained, rank) + 1, "lower_is_better": True},
        }
    )
    assert done.code == 0
    assert cells(done.out, METRIC)[4] == cells(done.out, rank)[4] == "better"
    done = check({rank: {"value": reached(trained, rank) - 1, "lower_is_better": True}})
    assert done.code == 1 and cells(done.out, rank)[4] == "worse"


def test_changed_configuration_is_listed_before_the_metrics(trained: Path, check: Check) -> None:
    done = check(
        {METRIC: {"value": reached(trained)}},
        overrides=[*TRAINED, "data.batch_size=64", "duration=8st", "objective=dcl"],
        samples=300,
        ranks=8,
        notes=["The source shuffles less."],
    )
    assert done.code == 0
    changed = {
        "data.batch_size": ["64", "32"],
        "duration": ["8st", "4st"],
        "objective.kind": ["dcl", "infonce"],
        "objective.same_caption": ["null", "negative"],
        "training samples": ["300", "256"],
        "ranks": ["8", "1"],
    }
    assert {key: cells(done.out, key)[1:] for key in changed} == changed
    assert done.out.index("data.batch_size") < done.out.index(METRIC)
    assert "differs from" in done.out and f" in {len(changed)} values" in done.out
    assert "note: The source shuffles less." in done.out
