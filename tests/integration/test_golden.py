"""The comparison of the present tree with a commit: what `tests/golden.py` finds, and what it ignores."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from safetensors.torch import save_file

TENSORS = {
    "model/weight": torch.tensor([[1.0, 2.0], [3.0, -0.0]]),
    "model/bias": torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16),
    "optimizer/step": torch.tensor(4),
    "objective/u": torch.zeros(0),
}
ROW = {"step": 4, "seconds": 1.5, "train/loss": 0.1, "train/step_s": 0.3, "eval/zeroshot/top1": float("nan")}


def written(folder: Path, tensors: dict[str, torch.Tensor] = TENSORS, row: dict[str, Any] = ROW) -> Path:
    """Writes the files of a run that are compared, and an older checkpoint that is not."""
    for step, saved in ((2, {"model/weight": torch.zeros(1)}), (4, tensors)):
        checkpoint = folder / f"checkpoints/step-{step:08d}"
        checkpoint.mkdir(parents=True)
        save_file(saved, checkpoint / "tensors.safetensors")
    (folder / "checkpoints/tmp.step-00000006").mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def found(base: Path, now: Path, renamed: dict[str, str] | None = None) -> list[str]:
    first, second = golden.read_run(base), golden.read_run(now)
    return golden.differences(golden.comparable(first, renamed or {}), golden.comparable(second, {}))


def test_runs_that_differ_in_columns_of_the_clock_are_equal(tmp_path: Path) -> None:
    later = written(tmp_path / "b", row=ROW | {"seconds": 2.5, "train/step_s": 0.4})
    assert found(written(tmp_path / "a"), later) == []


CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"model/weight": torch.tensor([[1.0, 2.0], [3.0000002384185791, -0.0]])},  # the next number
        {},
        "model/weight (tensors.safetensors): 1 of 4 numbers, at most by 2.38e-07; the first is 3.0 in BASE, now "
        "3.000000238418579",
    ),
    (
        {"model/weight": torch.tensor([[1.0, 2.0], [3.0, 0.0]])},  # the sign bit of zero
        {},
        "model/weight (tensors.safetensors): 1 of 4 numbers, at most by 0; the first is -0.0 in BASE, now 0.0",
    ),
    (
        {"optimizer/step": torch.tensor(4, dtype=torch.int32)},
        {},
        "optimizer/step (tensors.safetensors): torch.int64 [] in BASE, now torch.int32 []",
    ),
    (
        {"model/more": torch.ones(2)},
        {},
        "model/more (tensors.safetensors): missing in BASE, now torch.float32 [2]",
    ),
    (
        {},
        {"train/loss": 0.10000000000000002},
        "train/loss (metrics.jsonl:1): 0.1 in BASE, now 0.10000000000000002",
    ),
    ({}, {"train/more": 1}, "train/more (metrics.jsonl:1): missing in BASE, now 1"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "row", "expected"), CHANGES)
def test_each_difference_is_described(
    tmp_path: Path, tensors: dict[str, Any], row: dict[str, Any], expected: str
) -> None:
    assert found(written(tmp_path / "a"), written(tmp_path / "b", TENSORS | tensors, ROW | row)) == [expected]


def test_a_missing_metric_and_a_missing_row_are_differences(tmp_path: Path) -> None:
    base = written(tmp_path / "a")
    now = written(tmp_path / "b", row={name: value for name, value in ROW.items() if name != "train/loss"})
    assert found(base, now) == ["train/loss (metrics.jsonl:1): 0.1 in BASE, now missing"]
    with (base / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "seconds": 1}\n')
    assert found(base, now)[1:] == ["step (metrics.jsonl:2): 5 in BASE, now missing"]


def test_renamed_names_are_compared_under_their_present_names(tmp_path: Path) -> None:
    base = written(tmp_path / "a", {"model/w": torch.ones(2)}, {"train/l": 1, "train/elapsed": 2})
    now = written(tmp_path / "b", {"model/weight": torch.ones(2)}, {"train/loss": 1, "train/seconds": 3})
    renamed = {"model/w": "model/weight", "train/l": "train/loss", "train/elapsed": "train/seconds"}
    assert found(base, now, renamed) == []
    assert len(found(base, now)) == 5  # the present seconds are not compared
    with pytest.raises(ValueError, match="RENAMED gives the name train/l to two values of metrics"):
        found(base, now, {"train/elapsed": "train/l"})


def test_a_row_is_as_expected_if_it_is_equal_or_changed_on_purpose() -> None:
    many = [f"difference {number}" for number in range(7)]
    assert golden.verdict([], "2 tensors", changed=False) == (True, ["equal (2 tensors)"])
    assert golden.verdict([], "2 tensors", changed=True)[0] is False
    assert golden.verdict(many[:1], "2 tensors", changed=True)[0] is True
    assert golden.verdict(many, "2 tensors", changed=False) == (
        False, ["differences: 7 (2 tensors)", *many[:5], "and 2 more"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "nowhere is not a commit of "),
        (("HEAD", "--row", "clip"), "clip is not a row: choose from default, fastclip, "),
        (
            ("HEAD", "--row", "slurm", "--changed", "coca"),
            "--changed coca has no effect, the row does not run: add --row",
        ),
        (("HEAD", "--keep", "/"), "--keep / exists: give a new folder"),
    ],
)
def test_invalid_arguments_are_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        golden.main(words)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith(f"golden.py: {message}") and error.count("\n") == 1


@pytest.mark.slow
def test_a_changed_tree_is_found(tmp_path: Path) -> None:
    """A clone with another default seed, and its own commit as BASE. The row of the job script, which gives its seeds,
    is equal."""
    clone = tmp_path / "a clone"
    subprocess.run(["git", "clone", "--quiet", str(golden.ROOT), str(clone)], check=True)
    for name in ("golden.py", "helpers/runs.py"):  # they may differ from those of the commit
        shutil.copy(golden.ROOT / "tests" / name, clone / "tests" / name)
    config = clone / "conf/train.yaml"
    text = config.read_text()
    assert "\nseed: 0\n" in text
    config.write_text(text.replace("\nseed: 0\n", "\nseed: 1\n"))
    command = [sys.executable, str(clone / "tests/golden.py"), "HEAD", "--row", "slurm", "--row", "stages"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "equal (0 tensors" in done.stdout
    assert "1 of 2 rows are as expected" in done.stdout
    worktrees = subprocess.run(
        ["git", "-C", str(clone), "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert len(worktrees.stdout.splitlines()) == 1
