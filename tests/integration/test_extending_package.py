"""The package of docs/extend: a command and a format of weights, from its pages, on the path as an installed package is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import CODE
from helpers.documentation import write_files
from helpers.packages import entry_points, write_metadata
from safetensors.torch import load_file

STORED = Path(__file__).parent / "stored_run"
OPTIONS = {"clipx.options": {"my_clipx": "my_clipx.options"}}


def install(folder: Path, page: str, groups: dict[str, dict[str, str]] | None = None) -> None:
    """Writes the package of a page, with the metadata that pip would write. `groups`: entry points; None: the page's."""
    write_files(page, folder)
    for name in ("__init__.py", "options.py"):
        (folder / "my_clipx" / name).touch()
    write_metadata(folder, "my_clipx", groups or entry_points(folder))


def clipx(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), CODE)), "COLUMNS": "150"}
    command = [sys.executable, "-m", "clipx", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def printed(folder: Path, *words: str) -> str:
    done = clipx(folder, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(folder: Path, *words: str) -> str:
    done = clipx(folder, *words)
    assert done.returncode == 2, done
    return done.stderr.removeprefix("error: ").removesuffix("\n")


def test_a_command(tmp_path: Path) -> None:
    install(tmp_path, "docs/extend/command.md")
    shown = printed(tmp_path, "words", "data=shapes", "data.samples=64", "data.held_out_samples=16", "top=3")
    counts = [int(line.split()[0]) for line in shown.splitlines()]
    assert len(counts) == 3 and counts == sorted(counts, reverse=True) and counts[0] > 20
    assert "(int; at least 1)\n    Number of words to print." in printed(tmp_path, "words", "--help", "top")
    listed = [line for line in printed(tmp_path, "--help").splitlines() if line.split()[:1] == ["words"]]
    assert listed == ["  words        my_clipx.words     prints how often words occur in the captions of a data set"]
    assert refused(tmp_path, "words", "data=shapes", "top=0") == "top=0 must be at least 1: the default is 10"
    assert refused(tmp_path, "words") == "data has no value: give the data whose captions are read, e.g. data=shapes"
    assert refused(tmp_path, "words", "data=shapes", "evaluator=[zeroshot]").startswith(
        "evaluator=[zeroshot] has no effect"
    )


@pytest.mark.parametrize("name", ["train", "look"])
def test_a_command_with_the_name_of_another_is_an_error(tmp_path: Path, name: str) -> None:
    install(tmp_path, "docs/extend/command.md", OPTIONS | {"clipx.commands": {name: "my_clipx.words:main"}})
    message = refused(tmp_path, "look", "data=shapes")
    assert message == (
        "my_clipx.words:main, which the installed package my_clipx names under clipx.commands, cannot be started, "
        f"since there is a command {name}: give it another name, or uninstall the package"
    )


@pytest.mark.slow
def test_a_format_of_weights(tmp_path: Path) -> None:
    install(tmp_path, "docs/extend/weights.md", OPTIONS)
    printed(tmp_path, "export", f"run={STORED}", "format=lab", "out=lab_weights")
    printed(tmp_path, "export", f"run={STORED}", "format=safetensors", "out=own.safetensors")
    printed(tmp_path, "export", "run=lab_weights", "format=safetensors", "out=back.safetensors")
    own, back = (load_file(tmp_path / f"{name}.safetensors") for name in ("own", "back"))
    assert own.keys() == back.keys()
    exact = {name: tensor.float() for name, tensor in own.items()}  # weights that are no run are read in float32
    torch.testing.assert_close(back, exact, rtol=0, atol=0)
    assert refused(tmp_path, "export", f"run={STORED}", "format=lap", "out=x") == (
        "format=lap is not a format that is written: choose one of open_clip, safetensors, open_clip_checkpoint, hf, lab"
    )
    (tmp_path / "lab_weights/config.json").write_text('{"model_type": "another"}')
    assert "has no open_clip_config.json" in clipx(tmp_path, "export", "run=lab_weights", "format=hf", "out=y").stderr
