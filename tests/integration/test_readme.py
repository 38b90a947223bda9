"""Options and files that the README and the pages of its tables mention exist. `test_docs_commands.py` composes their commands."""

from __future__ import annotations

import importlib
import re

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


@pytest.mark.parametrize("path", re.findall(r"`(clipx/[\w/]+\.py|conf/[\w/]+\.yaml|tests/[\w/]+\.py)`", TEXT))
def test_every_file_in_the_pages_exists(path: str) -> None:
    assert (ROOT / path).is_file()


def test_the_readme_is_short_and_has_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    installed = "python3 -m venv .venv && .venv/bin/pip install -q -e "
    assert f"{installed}. && .venv/bin/python -m clipx.train\n" in readme
    assert f"{installed}'.[test]' && .venv/bin/python -m pytest -q -n 3\n" in readme
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
