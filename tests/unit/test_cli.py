"""Commands: their list, those that texts name, and the command line that repeats a run."""

from __future__ import annotations

import contextvars
import re
import shlex
import sys
import tomllib

import pytest
from helpers import ROOT
from helpers.runs import run

from clipx.__main__ import commands
from clipx.cli import record_command, repeat_command
from clipx.config import catalogue

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_clipx_lists_all_commands() -> None:
    printed = run(sys.executable, "-m", "clipx").stdout
    targets = {target.partition(":")[0].removesuffix(".__main__") for target in SCRIPTS.values()}
    listed = dict(commands())
    assert len(listed) == len(list(commands())), "each command is listed once"
    assert listed.keys() == {command.module.removesuffix(".__main__") for command in catalogue.commands()}
    assert targets - {"clipx", "clipx_launch"} <= listed.keys()
    for module, summary in listed.items():
        assert re.search(rf"python -m {re.escape(module)} +{re.escape(summary)}\n", printed)


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
