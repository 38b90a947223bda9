"""The commands as users type them, in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import SMALL, VIT, rows, run

TRAIN = (sys.executable, "-m", "clipx.train")


# Modules that a start must not import: each takes between 0.1 s and several seconds.
HEAVY = (
    *("torch", "torchvision", "timm", "transformers", "numpy", "PIL", "pyarrow", "fsspec", "s3fs", "safetensors"),
    *("tokenizers", "matplotlib", "rich", "tensorboard", "wandb", "sklearn", "submitit", "asyncio"),
    *("clipx.trainer.trainer", "clipx.checkpoint.format", "clipx.checkpoint.async_writer", "clipx.checkpoint.state"),
)


def without_heavy_modules(*codes: str) -> str:
    """Returns the output of pieces of code that must import none of the heavy modules, and fewer than 600 in total."""
    check = f"import sys\nloaded = {{*{HEAVY}}} & sys.modules.keys()\nassert not loaded, (sys.argv, loaded)\n"
    check += "assert len(sys.modules) < 600, (sys.argv, len(sys.modules))"
    return run(sys.executable, "-c", "\n".join(f"{code}\n{check}" for code in codes)).stdout


def command_code(*arguments: str) -> str:
    """Returns code that does what the command does, and continues after its exit."""
    return (
        f"import sys\nsys.argv = ['clipx-train', *{arguments}]\nfrom clipx.train import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass"
    )


def test_commands_that_do_not_train_import_no_heavy_module() -> None:
    commands = ["modl=x"], ["--help"], ["--help", "data.shuffle_window"], ["-sc", "install=bash"]
    printed = without_heavy_modules(*(command_code(*arguments) for arguments in commands))
    for part in ("data: benchmark, cc12m", "shuffle_window", "hydra_bash_completion"):
        assert part in printed


# -------------------------------------------------------------------------------------- a reader that ends, as `head`

CODE = """
from clipx.report.console import Screen
screen = Screen(True)
screen.print("x" * 10_000)
screen.table("results", {"train/loss": 1.0})
print("more")
"""


# The output of a run is discarded, and the run continues.
@pytest.mark.parametrize(("arguments", "code"), [(("-m", "clipx.train", "--help"), 141), (("-c", CODE), 0)])
def test_output_without_a_reader_is_no_traceback(arguments: tuple[str, ...], code: int) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.Popen([sys.executable, *arguments], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (code, "")


TINY = (*SMALL, *VIT, "duration=2st", "schedule.warmup=1st", "checkpoint=none")


def test_a_failed_point_is_named_and_the_others_are_trained(tmp_path: Path) -> None:
    sweep = f"hydra.sweep.dir={tmp_path}/sweep"
    done = run(*TRAIN, "-m", "optimizer.lr=-1,1e-3,inf", *TINY, sweep, check=False)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert errors[0].startswith("error: point 0 (optimizer.lr=-1 ")
    assert errors[0].endswith("): optimizer.lr=-1.0 must be above 0: the reference of AdamW is 5e-4")
    assert errors[1].startswith("error: point 2 (optimizer.lr=inf ")
    assert errors[1].endswith("): optimizer.lr=inf is not a finite number: give one")
    assert "Traceback" not in done.stderr
    assert [row["step"] for row in rows(tmp_path / "sweep" / "1")] == [1, 2]
