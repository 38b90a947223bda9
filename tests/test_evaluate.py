"""`clipx.evaluate` finds a run's own numbers again, on its own data or another's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support import SMALL, rows, run

TRAIN = (sys.executable, "-m", "clipx.train", *SMALL, "checkpoint.every=2st", "evaluator=[zeroshot,retrieval]")
EVALUATE = (sys.executable, "-m", "clipx.evaluate")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("evaluate") / "run"
    run(*TRAIN, f"run_dir={run_dir}")
    return run_dir


def test_the_numbers_of_the_end_of_training_are_found_again(trained: Path) -> None:
    out = run(*EVALUATE, f"run={trained}").stdout
    found = json.loads((trained / "evaluation-shapes-step-4.json").read_text())
    expected = {name: value for name, value in rows(trained)[-1].items() if name.startswith("eval/")}
    assert len(expected) == 16
    assert {n: v for n, v in found.items() if n.startswith("eval/")} == expected
    assert "eval/zeroshot/held_out/top1" in out


def test_a_step_and_one_evaluator_can_be_chosen(trained: Path) -> None:
    run(*EVALUATE, f"run={trained}", "step=2", "evaluator=[retrieval]")
    found = json.loads((trained / "evaluation-shapes-step-2.json").read_text())
    assert {name.split("/")[1] for name in found if name.startswith("eval/")} == {"retrieval"}


def test_other_data_can_be_chosen(trained: Path) -> None:
    run(*EVALUATE, f"run={trained}", "data=digits", "data.workers=0")
    found = json.loads((trained / "evaluation-digits-step-4.json").read_text())
    assert found["eval/zeroshot/chance"] == 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "run has no value: it is required"),
        (("run=/nowhere",), "run=/nowhere holds no run (no config.yaml): check the path"),
        (("step=3",), "step-00000003 cannot be used: it is not there; there are 4, 2"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(trained: Path, arguments: tuple[str, ...], message: str) -> None:
    chosen = (f"run={trained}", *arguments) if arguments == ("step=3",) else arguments
    done = run(*EVALUATE, *chosen, check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
