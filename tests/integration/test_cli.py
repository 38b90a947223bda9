"""The commands as users type them, in separate processes."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.cases import slow_except
from helpers.runs import SMALL, VIT, rows, run

from clipx.cli import cli

TRAIN = (sys.executable, "-m", "clipx.train")
EVALUATE = (sys.executable, "-m", "clipx.evaluate")
SCRIPT = str(Path(sys.executable).with_name("clipx-train"))


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


# ------------------------------------------------------------------------------------------------- fast starts


def test_composing_from_python_imports_no_heavy_module() -> None:
    without_heavy_modules("from clipx import compose\nfor data in ('shapes', 'laion400m'): compose(f'data={data}')")


def test_commands_that_do_not_train_import_no_heavy_module() -> None:
    commands = ["modl=x"], ["--help"], ["--help", "data.shuffle_window"], ["-sc", "install=bash"]
    printed = without_heavy_modules(*(command_code(*arguments) for arguments in commands))
    for part in ("data: benchmark, cc12m", "shuffle_window", "hydra_bash_completion"):
        assert part in printed


def test_composing_a_large_run_imports_no_heavy_module() -> None:
    """Composition takes 0.5 s of CPU time: 424 modules, most of them from Python and Hydra."""
    composed = yaml.safe_load(without_heavy_modules(command_code("model=vit_l14", "data=laion400m", "--cfg", "job")))
    assert composed["model"]["image"]["timm"] == "vit_large_patch14_clip_224"
    assert composed["data"]["samples"] == 414_080_000


@pytest.mark.parametrize("command", [TRAIN, EVALUATE], ids=["train", "evaluate"])
def test_help_lists_the_options_of_each_group(command: tuple[str, ...]) -> None:
    text = run(*command, "--help").stdout
    assert "data: benchmark, cc12m, cc3m, csv, datacomp1b, datacomp_medium, datacomp_small, digits, folder" in text
    assert "evaluator: linear_probe, retrieval, zeroshot" in text


# ---------------------------------------------------------------------------------------------------------- errors


def test_configuration_errors_are_one_line_with_exit_code_2(tmp_path: Path) -> None:
    done = run(*TRAIN, "seed=-1", f"run_dir={tmp_path}/run", check=False)
    assert (done.returncode, done.stderr) == (2, "error: seed=-1 must be in [0, 2^63): give 0 or more\n")
    assert not (tmp_path / "run").exists()


def test_options_are_accepted_between_overrides(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/mine.yaml").write_text("defaults: [adamw]\nlr: 0.5\n")
    words = ("seed=3", "--cfg", "job", "optimizer=mine", "--config-dir", str(tmp_path), "name=a", "-p", "optimizer")
    assert "lr: 0.5\n" in run(*TRAIN, *words, "run_dir=b").stdout


def test_hydra_full_error_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    done = run(*TRAIN, "seed=-1", check=False)
    assert done.returncode == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert "in __post_init__" in done.stderr
    assert done.stderr.endswith("\nerror: seed=-1 must be in [0, 2^63): give 0 or more\n")


def test_errors_of_a_job_name_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    done = run(*TRAIN, "seed=-1", check=False)
    assert done.stderr == "error (rank 3): seed=-1 must be in [0, 2^63): give 0 or more\n"


# -------------------------------------------------------------------------------------- a reader that ends, as `head`

CODE = """
from clipx.report.console import Screen
screen = Screen(True)
screen.print("x" * 10_000)
screen.table("results", {"train/loss": 1.0})
print("more")
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("-m", "clipx.train", "--help"), 141),
        (("-m", "clipx_launch", "script", "--help"), 141),
        (("-c", CODE), 0),  # the output of a run is discarded, and the run continues
    ],
)
def test_output_without_a_reader_is_no_traceback(arguments: tuple[str, ...], code: int) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.Popen([sys.executable, *arguments], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (code, "")


# -------------------------------------------------------------------------------------------------- tab completion


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_groups_options_and_keys(tmp_path: Path) -> None:
    (tmp_path / "clipx-train").symlink_to(SCRIPT)  # Hydra's code does not complete a command in a path with a space
    expected = {
        "clipx-train objective=": {"objective=infonce"},
        "clipx-train obj": {"objective="},
        "clipx-train mod": {"model"},  # and model/text=
        "clipx-train seed=1 model=vit_b": {"model=vit_b16", "model=vit_b32", "model=vit_bigg14"},
        "clipx-train data.ba": {"data.batch_size="},
    }
    script = f"""
        set -e
        PATH={shlex.quote(str(tmp_path))}:$PATH
        eval "$(clipx-train -sc install=bash)"
        complete -p clipx-train | grep -q hydra_bash_completion
        for line in "$@"; do
            COMP_LINE="$line" COMP_POINT=${{#line}} COMP_WORDS=($line) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)) COMPREPLY=()
            hydra_bash_completion
            echo "${{COMPREPLY[@]}}"
        done
        eval "$(clipx-train -sc uninstall=bash)"
    """
    done = run("bash", "-c", script, "bash", *expected)
    for line, printed in zip(expected, done.stdout.splitlines(), strict=True):
        assert set(printed.split()) >= expected[line]
        assert all(word.startswith(line.split()[-1]) for word in printed.split())
    assert done.stderr == ""


@pytest.mark.parametrize("shell", slow_except(["zsh", "fish"], "fish"))
def test_completion_commands_exit_with_0(shell: str) -> None:
    done = run(SCRIPT, "-sc", f"install={shell}")
    assert "hydra" in done.stdout
    assert done.stderr == ""


# ---------------------------------------------------------------------------------------------------------- sweeps

TINY = (*SMALL, *VIT, "duration=2st", "schedule.warmup=1st", "checkpoint=none")


def test_a_sweep_trains_each_point_in_its_own_folder(tmp_path: Path) -> None:
    done = run(*TRAIN, "-m", "seed=0,1", *TINY, f"hydra.sweep.dir={tmp_path}/sweep", check=False)
    assert done.returncode == 0, done.stderr
    points = sorted(tmp_path.glob("sweep/*/config.yaml"))
    assert [point.parent.name for point in points] == ["0", "1"]
    for seed, point in enumerate(points):
        spec = yaml.safe_load(point.read_text())
        assert (spec["seed"], spec["run_dir"]) == (seed, str(point.parent))
        assert [row["step"] for row in rows(point.parent)] == [1, 2]
    assert rows(points[0].parent)[0]["train/loss"] != rows(points[1].parent)[0]["train/loss"]


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


def test_a_sweep_uses_explicit_run_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-m", "seed=3,4", f"run_dir={tmp_path}/s${{seed}}", f"hydra.sweep.dir={tmp_path}/sweep")
    monkeypatch.setattr("sys.argv", ["clipx-train", *words])
    cli(lambda spec: print("in", spec.run_dir), "train")()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("in ")]
    assert printed == [f"in {tmp_path}/s3", f"in {tmp_path}/s4"]


# ------------------------------------------------------------------------------------------------------ from Python

NOTEBOOK = f"""
from hydra import compose as other_compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

initialize_config_dir("FOLDER", version_base="1.3")  # as another application, or an earlier cell, leaves it

from clipx import Trainer, compose
spec = compose(*{SMALL}, "run_dir=FOLDER/run", "seed=3")
final = Trainer(spec).fit()

assert GlobalHydra.instance().is_initialized()
assert dict(other_compose("train")) == {{"answer": 42}}
assert final["step"] == 4, final
print("loss", final["train/loss"])
"""


def test_three_lines_of_python_train_inside_another_hydra_app(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("answer: 42\n")
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK.replace("FOLDER", str(tmp_path)))
    done = run(sys.executable, str(script))
    assert float(done.stdout.rpartition("loss ")[2]) > 0
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 3


def test_log_lines_have_a_level_and_other_packages_log_only_warnings() -> None:
    """Hydra's own configuration begins every line with [HYDRA], and prints where botocore found credentials."""
    code = (
        "import logging, sys\nfrom clipx.cli import cli\n"
        "def task(spec):\n"
        "    for name in ('clipx.data.spec', 'hydra.core', 'aiobotocore.credentials'):\n"
        "        for level in (logging.INFO, logging.WARNING):\n"
        "            logging.getLogger(name).log(level, name)\n"
        "sys.argv = ['clipx-select', 'scores=x', 'out=x.npy']\n"
        "import clipx.data.select\ncli(task, 'select')()"
    )
    printed = run(sys.executable, "-c", code).stdout
    assert [line.partition("] ")[2] for line in printed.splitlines()] == [
        *("INFO: clipx.data.spec", "WARNING: clipx.data.spec", "INFO: hydra.core", "WARNING: hydra.core"),
        "WARNING: aiobotocore.credentials",
    ]
