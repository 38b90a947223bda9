"""Files, classes and functions that docs/architecture names exist, and its picture shows all layers."""

from __future__ import annotations

import ast
import re
import runpy

import pytest
from helpers import ROOT

PAGES = sorted((ROOT / "docs/architecture").glob("*.md"))
CODE = [path for folder in ("clipx", "launch") for path in sorted((ROOT / folder).rglob("*.py"))]
NAME = r"[A-Z]\w*(\.\w+)?|\w+\.(?!json|yaml|toml|html|svg)\w+|\w*[a-z]_\w+"  # with a capital, a dot or an underscore
FOREIGN = r"(torch|safetensors|FileSystemReader|MANIFEST|TYPE_CHECKING|class_|import_)"  # of Python and other packages


def definitions(body: list[ast.stmt]) -> set[str]:
    """Returns the functions, classes and attributes that the statements of a module or a class define."""
    assigned = [node.targets if isinstance(node, ast.Assign) else [node.target] for node in body if is_assignment(node)]
    names = {target.id for targets in assigned for target in targets if isinstance(target, ast.Name)}
    return names | {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def is_assignment(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


def index() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Returns the definitions of each module, by the module's last name, and of each class. Bases are included."""
    modules: dict[str, set[str]] = {}
    classes: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for path in CODE:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = path.parent.name if path.stem == "__init__" else path.stem
        modules.setdefault(module, set()).update(definitions(tree.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(definitions(node.body))
                bases.setdefault(node.name, []).extend(ast.unparse(base) for base in node.bases)
    for name, parents in bases.items():
        for parent in parents:
            classes[name] |= classes.get(parent, set())
    return modules, classes


MODULES, CLASSES = index()


def exists(name: str) -> bool:
    """Returns whether `name` is a module of clipx, or FUNCTION, CLASS, ATTRIBUTE, MODULE.FUNCTION, CLASS.ATTRIBUTE."""
    owner, _, attribute = name.rpartition(".")
    if owner:
        found = attribute in MODULES.get(owner, set()) | CLASSES.get(owner, set())
        return found or (owner in ("clipx", "clipx_launch") and attribute in MODULES)
    return name in CLASSES or any(name in found for found in (*MODULES.values(), *CLASSES.values()))


def named(text: str) -> set[str]:
    """Returns the words in backticks, without blocks of code."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_and_code_that_a_page_names_exist(page) -> None:
    words = named(page.read_text(encoding="utf-8"))
    paths = {word for word in words if re.fullmatch(r"(clipx|launch|conf|tests|unit|docs)/[\w/]+(\.\w+)?", word)}
    missing = [path for path in paths if not ((ROOT / path).exists() or (ROOT / "tests" / path).exists())]
    assert not missing
    code = {word for word in words if re.fullmatch(NAME, word) and not re.match(FOREIGN, word)}
    assert len(code) > 3
    assert not [word for word in sorted(code) if not (exists(word) or is_key(word) or is_option(word))]


def is_option(word: str) -> bool:
    """Returns whether a word is an option of a group, or a package."""
    return word in MODULES or any((ROOT / "conf").rglob(f"{word}.yaml")) or (ROOT / "launch" / word).is_dir()


def is_key(word: str) -> bool:
    """Returns whether a word is an option: GROUP.KEY, with a KEY that a spec declares."""
    group, _, key = word.partition(".")
    fields = set().union(*(names for owner, names in CLASSES.items() if owner.endswith("Spec")))
    return group in CLASSES["RunSpec"] and key in fields


def test_a_name_that_does_not_exist_is_found() -> None:
    assert exists("Trainer.fit") and exists("train_loader") and exists("DistributedSpec.build")
    assert not exists("Trainer.fits") and not exists("Trainers") and not exists("trainer.fit")
    assert is_key("checkpoint.remote") and not is_key("checkpoint.remotes")


def test_the_picture_shows_the_layers_of_the_contract() -> None:
    module = runpy.run_path(str(ROOT / "docs/architecture/picture.py"))
    drawn = (ROOT / "docs/architecture/layers.svg").read_text(encoding="utf-8")
    assert module["picture"]() == drawn, "python docs/architecture/picture.py writes it again"
    assert {name for names in module["layers"]() for name in names} >= {"clipx_launch", "trainer", "errors"}
