"""The README is short, and its files exist. `test_docs_commands.py` composes its commands."""

from __future__ import annotations

import re

from helpers import ROOT


def test_the_readme_is_short_and_has_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    installed = "python3 -m venv .venv && .venv/bin/pip install -q -e "
    assert f"{installed}. && .venv/bin/python -m clipx.train\n" in readme
    assert f"{installed}'.[test]' && .venv/bin/python -m pytest -q -n 3\n" in readme
    for path in re.findall(r"\]\((?!https?:)([^)#]+)", readme):
        assert (ROOT / path).is_file(), path
