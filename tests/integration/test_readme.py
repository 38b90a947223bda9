"""Options, commands and files that the README mentions exist and compose."""

from __future__ import annotations

import re

import pytest
from helpers import ROOT

from clipx.config.registry import CONF_DIR
from clipx.trainer.spec import compose

README = (ROOT / "README.md").read_text()


def test_every_option_in_the_readme_exists() -> None:
    named = re.findall(r"(model|data|objective|optimizer|schedule|precision|checkpoint)=(\w+)(?![\w/.])", README)
    assert len(named) > 10
    for group, option in named:
        assert option == "hinge" or (CONF_DIR / group / f"{option}.yaml").is_file(), f"{group}={option}"


def test_every_training_command_in_the_readme_composes() -> None:
    commands = re.findall(r"-m clipx\.train (?!--)([^`\n]*?)(?: #.*|`.*)?$", README, re.MULTILINE)
    assert len(commands) > 5
    for command in commands:
        words = [word for word in command.replace("'", "").split() if "=" in word and "…" not in word]
        points = [word.split(",")[0] if "-m" in command.split() and "[" not in word else word for word in words]
        compose(*points)


@pytest.mark.parametrize("path", re.findall(r"`(clipx/[\w/]+\.py|conf/[\w/]+\.yaml|tests/[\w/]+\.py)`", README))
def test_every_file_in_the_readme_exists_or_is_the_example(path: str) -> None:
    assert (ROOT / path).is_file() or "hinge" in path
