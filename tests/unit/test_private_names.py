"""No file of clipx but compat.py uses a private name of another package."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator

from helpers import ROOT

OWN = ("clipx", "clipx_launch", "hydra_plugins")
DOCUMENTED = {  # with a leading underscore
    *("_exit", "_asdict", "_fields", "_replace"),  # os, typing.NamedTuple
    "_target_",  # Hydra
    "_{}",  # fsspec: the coroutine of a method
}
BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "import_module", "attrgetter", "getLogger")


def is_private(dotted: str) -> bool:
    return any(re.match(r"_[^_]", part) for part in dotted.split("."))


def names_of_classes(tree: ast.AST) -> Iterator[str]:
    """Yields the names of methods, fields and attributes of the classes of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                match statement:
                    case (
                        ast.FunctionDef(name=name)
                        | ast.AsyncFunctionDef(name=name)
                        | ast.AnnAssign(target=ast.Name(id=name))
                    ):
                        yield name
                    case ast.Assign(targets=[ast.Name(id=name)]):
                        yield name
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def private_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Yields private names that a module uses and that are none of `own`: attributes, imports, and names in strings."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if is_private(name) and name not in own:
                yield ast.unparse(node)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] not in OWN:
                yield from (f"{module}.{x.name}" for x in node.names if is_private(f"{module}.{x.name}"))
            case ast.Import(names=names):
                yield from (x.name for x in names if is_private(x.name))
            case ast.Call(args=arguments) if ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
                strings = [
                    re.sub("{.*?}", "{}", ast.unparse(x)[2:-1]) for x in arguments if isinstance(x, ast.JoinedStr)
                ]
                strings += [x.value for x in arguments if isinstance(x, ast.Constant) and isinstance(x.value, str)]
                yield from (text for text in strings if is_private(text) and text not in own)


def overridden(tree: ast.Module) -> Iterator[str]:
    """Yields private methods of classes that their base class of another package has."""
    imported = {x.asname or x.name: f"{node.module}.{x.name}" for node in tree.body
                if isinstance(node, ast.ImportFrom) for x in node.names}  # fmt: skip
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = [x.name for x in node.body if isinstance(x, ast.FunctionDef) and is_private(x.name)]
            for first, _, rest in (ast.unparse(base).partition(".") for base in node.bases if methods):
                place = imported.get(first, "clipx")
                if place.partition(".")[0] not in (*OWN, "__future__"):
                    base = pkgutil.resolve_name(f"{place}.{rest}".rstrip("."))
                    yield from (f"{node.name}.{name}" for name in methods if hasattr(base, name))


def test_no_other_file_uses_a_private_name_of_another_package() -> None:
    files = sorted(path for folder in ("clipx", "launch") for path in (ROOT / folder).rglob("*.py"))
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    del trees["clipx/compat.py"]
    assert len(trees) > 300
    own = {name for tree in trees.values() for name in names_of_classes(tree)} | DOCUMENTED
    found = {name: {*private_names(tree, own), *overridden(tree)} for name, tree in trees.items()}
    assert not {name: names for name, names in found.items() if names}


def test_the_check_finds_private_names() -> None:
    code = """
import torch._dynamo
from torch._C import Store
from timm.models import _builder
from submitit.slurm.slurm import SlurmExecutor
class Executor(SlurmExecutor):
    def _make_submission_file_text(self): ...
    def _own(self): return self._own(), self._num_tasks()
getattr(torch, "_assert_async"); import_module("torch._inductor.config"); getattr(fs, f"_{name}")
"""
    tree = ast.parse(code)
    own = {*names_of_classes(tree)}
    assert {*private_names(tree, own), *overridden(tree)} == {
        *("torch._dynamo", "torch._C.Store", "timm.models._builder", "self._num_tasks", "_assert_async"),
        *("torch._inductor.config", "_{}", "Executor._make_submission_file_text"),
    }
