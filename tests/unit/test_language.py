"""Rules of CONTRIBUTING.md on language, and on plain code, that a program can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
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


def test_the_check_finds_such_a_docstring() -> None:
    assert opens_barely("Of the newest checkpoint.")
    assert opens_barely("`What` a loss showed.")
    assert not opens_barely("Returns the newest checkpoint.")


# ------------------------------------------------------------------------------------------------- code


def tricks(code: str) -> list[int]:
    """Returns the lines that splice a literal, as in `f(*(a, b))` and `[*(a, b)]`, or change the class of an object."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List | ast.Set):
            found.append(node.lineno)
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store):
            found.append(node.lineno)
    return found


def test_no_literal_is_spliced_and_no_object_changes_its_class() -> None:
    files = [path for folder in ("clipx", "launch", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert not [f"{path}:{line}" for path in files for line in tricks(path.read_text())]


@pytest.mark.parametrize(
    "code", ["f(*(a, b))", "f(x, *[a], y=1)", "[*(a, b), c]", "a.__class__ = B", "x, a.__class__ = y"]
)
def test_the_check_finds_a_spliced_literal_and_a_changed_class(code: str) -> None:
    assert tricks(code) == [1]


def test_the_check_leaves_variables_and_comprehensions() -> None:
    assert not tricks("f(*a, *(b for b in c), **{**d, 'e': 1}); type(a), a.__class__, ('x', *y)")


# --------------------------------------------------------------------------------------------------- sentences


def idle_sentences(code: str) -> list[int]:
    """Returns the lines of texts, other than docstrings, that say by themselves that an option has no effect."""
    tree = ast.parse(code)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.lineno for node in texts if id(node) not in docs and re.search(r"\b(no|any) effect\b", node.value)]


def test_one_place_writes_that_an_option_has_no_effect() -> None:
    """`without_effect` writes the sentence, for the rules of keys and of groups, and for facts of a start."""
    files = [path for folder in ("clipx", "launch") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [str(path.relative_to(ROOT)) for path in files for _ in idle_sentences(path.read_text(encoding="utf-8"))]
    assert found == ["clipx/errors.py"]


def test_the_check_finds_a_sentence_that_is_written_by_hand() -> None:
    assert idle_sentences('"""It has no effect."""\nrequire(x, f"{key} has no effect with {other}: remove it")') == [2]


# ------------------------------------------------------------------------------------------------------ names


def test_a_class_name_serves_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in (path for folder in ("clipx", "launch") for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(ROOT)))
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
