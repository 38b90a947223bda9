"""Rules of CONTRIBUTING.md on language that a program can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from helpers import ROOT

PREPOSITIONS = (
    "of in on at by for from with to after before between beside under over as without like than against through near "
    "upon within into across beyond until since during"
)
QUESTION_WORDS = "what who where when why how which whether whose whom that"
BARE = {*PREPOSITIONS.split(), *QUESTION_WORDS.split()}


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def opens_barely(text: str) -> bool:
    word = re.match(r"\W*(\w+)", text)
    return word is not None and word[1].lower() in BARE


def test_no_docstring_begins_with_a_bare_preposition_or_question_word() -> None:
    files = [path for folder in ("clipx", "launch", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [(path, line, text) for path in files for line, text in docstrings(path)]
    assert len(found) > 2000
    assert not [f"{path}:{line}: {text}" for path, line, text in found if opens_barely(text)]
