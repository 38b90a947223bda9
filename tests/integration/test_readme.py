"""Options, commands and files that the README and the pages of its tables mention exist and compose."""

from __future__ import annotations

import importlib
import re
import shlex

import helpers.runs
import pytest
from helpers import ROOT

from clipx.config.registry import CONF_DIR
from clipx.trainer.spec import compose

PAGES = ("README.md", *(f"docs/guides/{name}.md" for name in ("commands", "models", "objectives", "optimizers")))
DATA = (ROOT / "docs/guides/data.md").read_text().split("\n## Shards")[0]  # its sources
TEXT = "\n".join([*((ROOT / page).read_text() for page in PAGES), DATA]).replace("\\\n", " ")


def test_every_option_in_the_pages_exists() -> None:
    named = re.findall(
        r"(?<![.\w])(model|data|objective|optimizer|schedule|precision|checkpoint)=([a-z]\w*)(?![\w/.])", TEXT
    )
    assert len(named) > 20
    for group, option in named:
        assert (CONF_DIR / group / f"{option}.yaml").is_file(), f"{group}={option}"


def test_every_training_command_in_the_pages_composes() -> None:
    commands = re.findall(r"-m clipx\.train (?!--)([^`\n]*?)(?: #.*|`.*)?$", TEXT, re.MULTILINE)
    assert len(commands) > 10
    for command in commands:
        words = [word for word in shlex.split(command) if "=" in word and "…" not in word]
        points = [word.split(",")[0] if command.startswith("-m ") and "[" not in word else word for word in words]
        compose(*points)


def test_every_command_on_stored_features_composes() -> None:
    section = (
        (ROOT / "docs/guides/finetuning.md").read_text().split("## Train a text tower on stored image features")[1]
    )
    text = section.split("\n## ")[0].replace("\\\n", " ").replace("'", "")
    commands = re.findall(r"^python -m clipx\.([\w.]+) (.*)$", text, re.MULTILINE)
    assert [name for name, _ in commands] == ["embed", "embed", "train", "data.vocabulary", "train"]
    for name, words in commands:
        importlib.import_module(f"clipx.{name}")  # registers its options
        spec = helpers.runs.compose(*words.split(), config_name=name.rpartition(".")[2])
        assert name != "train" or spec.model.image.features == 96


@pytest.mark.parametrize("path", re.findall(r"`(clipx/[\w/]+\.py|conf/[\w/]+\.yaml|tests/[\w/]+\.py)`", TEXT))
def test_every_file_in_the_pages_exists(path: str) -> None:
    assert (ROOT / path).is_file()


def test_the_readme_is_short_and_has_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    installed = "python3 -m venv .venv && .venv/bin/pip install -q -e "
    assert f"{installed}. && .venv/bin/python -m clipx.train\n" in readme
    assert f"{installed}'.[test]' && .venv/bin/python -m pytest -q -n 4\n" in readme
    for path in re.findall(r"\]\((?!https?:)([^)#]+)", readme):
        assert (ROOT / path).is_file(), path


def test_the_example_of_a_weak_reference_composes() -> None:
    importlib.import_module("clipx.embed")  # registers its options
    text = (ROOT / "docs/guides/objectives.md").read_text().split("## Reference model")[1]
    commands = re.findall(r"^python -m clipx\.(train|embed) (.*)$", text, re.MULTILINE)
    assert [name for name, _ in commands] == ["train", "embed", "train"]
    weak, _, strong = (compose(*words.split(), config_name=name) for name, words in commands)
    assert (strong.objective.kind, weak.objective.kind) == ("drrho_clip", "infonce")
    assert weak.model.embed_dim < strong.model.embed_dim and weak.model.text.width < strong.model.text.width
