"""Files, classes and functions that docs/architecture names exist, and its pictures show all layers and these files."""

from __future__ import annotations

import ast
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from helpers import ROOT

PAGES = sorted((ROOT / "docs/architecture").glob("*.md"))
NAME = r"[A-Z]\w*(\.\w+)?|\w+\.(?!json|yaml|toml|html|svg)\w+|\w*[a-z]_\w+"  # with a capital, a dot or an underscore
FOREIGN = r"(torch|safetensors|FileSystemReader|MANIFEST|TYPE_CHECKING|class_|import_)"  # of Python and other packages


@cache
def defined() -> set[str]:
    """Returns the names of modules, functions, classes and attributes of the source, and of options."""
    names = {path.stem for path in (ROOT / "conf").rglob("*.yaml")} | {"clipx", "clipx_launch"}
    for path in (*(ROOT / "clipx").rglob("*.py"), *(ROOT / "launch").rglob("*.py")):
        names |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_and_code_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    words = set(re.findall(r"`([^`\n]+)`", text))
    paths = {word for word in words if re.fullmatch(r"(clipx|launch|conf|tests|unit|docs)/[\w/]+(\.\w+)?", word)}
    assert not [path for path in paths if not ((ROOT / path).exists() or (ROOT / "tests" / path).exists())]
    code = {word for word in words if re.fullmatch(NAME, word) and not re.match(FOREIGN, word)}
    assert len(code) > 3
    assert not [word for word in sorted(code) if not set(word.split(".")) <= defined()]


def test_the_picture_shows_the_layers_of_the_contract() -> None:
    module = runpy.run_path(str(ROOT / "docs/architecture/picture.py"))
    drawn = (ROOT / "docs/architecture/layers.svg").read_text(encoding="utf-8")
    assert module["picture"]() == drawn, "python docs/architecture/picture.py writes it again"
    assert {name for names in module["layers"]() for name in names} >= {"clipx_launch", "trainer", "errors"}


def test_the_picture_of_the_flow_names_files_and_classes_that_exist() -> None:
    module = runpy.run_path(str(ROOT / "docs/architecture/picture.py"))
    drawn = (ROOT / "docs/architecture/flow.svg").read_text(encoding="utf-8")
    assert module["flow"]() == drawn, "python docs/architecture/picture.py writes it again"
    files = re.findall(r">(clipx/[^<]+)<", drawn)
    assert len(files) > 15
    assert not [file for file in files if not (ROOT / file).exists()]
    named = {part.name: part.file for part in module["FLOW"].values()}
    for name in ("Source", "Order", "Batch", "DevicePrefetcher", "Objective", "WeightAverage", "Meter"):
        assert f"class {name}" in (ROOT / named[name]).read_text(encoding="utf-8"), name
    assert "Trainer.step" in drawn and "def step(" in (ROOT / "clipx/trainer/trainer.py").read_text(encoding="utf-8")
