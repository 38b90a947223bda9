"""The commands as users type them, in separate processes."""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.runs import SMALL, VIT, run

TRAIN = (sys.executable, "-m", "clipx.train")
# Modules that a start must not import: each takes between 0.1 s and several seconds.
HEAVY = (
    *("torch", "torchvision", "timm", "transformers", "numpy", "PIL", "pyarrow", "fsspec", "s3fs", "safetensors"),
    *("tokenizers", "matplotlib", "rich", "tensorboard", "wandb", "sklearn", "submitit", "asyncio"),
    *("clipx.trainer.trainer", "clipx.checkpoint.format", "clipx.checkpoint.async_writer", "clipx.checkpoint.state"),
)


LARGE = ["model=vit_l14", "data=laion400m", "--cfg", "job"]


def test_commands_that_do_not_train_import_no_heavy_module() -> None:
    """None of the heavy modules, and fewer than 600 in total."""
    lines = [
        "import sys",
        "import clipx.__main__",
        "assert not {'hydra', 'omegaconf', 'argparse'} & sys.modules.keys()",
    ]
    lines += ["from clipx.train import main"]
    for arguments in (["modl=x"], ["--help"], ["--help", "data.shuffle_window"], ["-sc", "install=bash"], LARGE):
        lines += [f"sys.argv = ['clipx-train', *{arguments}]", "try:", "    main()", "except SystemExit:", "    pass"]
        lines += [f"loaded = {{*{HEAVY}}} & sys.modules.keys()", "assert not loaded, (sys.argv, loaded)"]
        lines += ["assert len(sys.modules) < 600, (sys.argv, len(sys.modules))"]
    printed = run(sys.executable, "-c", "\n".join(lines)).stdout
    for part in ("data: benchmark, cc12m", "shuffle_window", "hydra_bash_completion"):
        assert part in printed


TINY = (*SMALL, *VIT, "duration=2st", "schedule.warmup=1st", "checkpoint=none")


def test_a_sweep_with_a_point_that_cannot_run_starts_none(tmp_path: Path) -> None:
    done = run(*TRAIN, "-m", "optimizer.lr=-1,1e-3,inf", *TINY, f"hydra.sweep.dir={tmp_path}/sweep", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    first, *points = done.stderr.splitlines()
    assert first == "error: 2 of 3 points cannot run, nothing was started:"
    assert [" ".join(point.split()) for point in points] == [
        "point 0 optimizer.lr=-1 optimizer.lr=-1.0 must be above 0: the reference of AdamW is 5e-4",
        "point 2 optimizer.lr=inf optimizer.lr=inf is not a finite number: give one",
    ]
    assert not (tmp_path / "sweep").exists()


def test_configuration_errors_are_one_line_with_exit_code_2(tmp_path: Path) -> None:
    done = run(*TRAIN, "seed=-1", f"run_dir={tmp_path}/run", check=False)
    assert (done.returncode, done.stderr) == (2, "error: seed=-1 must be in [0, 2^63): give 0 or more\n")
    assert not (tmp_path / "run").exists()
