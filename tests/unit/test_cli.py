"""The command line that repeats a run, and command lines and folders in which no command can run."""

from __future__ import annotations

import contextvars
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clipx import train
from clipx.cli import record_command, repeat_command
from clipx_launch.__main__ import main as sweep_main


def recorded(overrides: list[str], folders: tuple[str, ...] = ()) -> str:
    """Returns the command line recorded for overrides, in a separate context."""

    def call() -> str | None:
        record_command("train", overrides, folders)
        return repeat_command()

    return contextvars.Context().run(call) or ""


def test_a_shell_reads_the_overrides_back() -> None:
    overrides = ["data.shards='/a b/{0..9}.tar'", "name=x$(id)`id`\\", "evaluator=[zeroshot,retrieval]", "+a='é\"'"]
    line = recorded(overrides, ("my conf",))
    assert shlex.split(line) == ["python", "-m", "clipx.train", "--config-dir", "my conf", *overrides]


def test_torchrun_is_part_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert recorded(["seed=1"]) == "torchrun --nnodes=2 --nproc-per-node=4 -m clipx.train seed=1"


def test_passwords_and_queries_of_urls_are_removed() -> None:
    assert "S3cr3t" not in recorded(["resume=https://user:S3cr3t@host/x", "data.shards=https://host/x.tar?sig=S3cr3t"])


@pytest.mark.parametrize("command", [train.main, lambda: sys.exit(sweep_main(["status"]))])
def test_a_removed_working_directory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Callable[[], None]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr("sys.argv", ["clipx-train", "--help"])
    with pytest.raises(SystemExit, match="2"):
        command()
    says = "error: the working directory cannot be used (No such file or directory): change to another by cd\n"
    assert capsys.readouterr() == ("", says)


def test_a_word_that_is_not_utf8_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["clipx-train", "data=csv", "data.path='caf\udce9/t.csv'", "--cfg", "job"])
    with pytest.raises(SystemExit, match="2"):
        train.main()
    assert "data.path='caf\\xe9/t.csv' contains an unprintable character: remove it" in capsys.readouterr().err
