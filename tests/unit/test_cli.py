"""The command line that repeats a run."""

from __future__ import annotations

import contextvars
import shlex

import pytest

from clipx.cli import record_command, repeat_command


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
