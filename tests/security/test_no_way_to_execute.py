"""The package calls no function that could execute its input. Only its benchmarks start processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import clipx

ROOT = Path(clipx.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if "bench" not in path.relative_to(ROOT).parts]
MODULES = {"subprocess", "pty", "pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jinja2"}
NAMES = {"eval", "exec", "__import__"}
CALLS = {"system", "popen", "posix_spawn", "unsafe_load", "full_load", "extractall", "instantiate", "get_method"}
LOADS = {"torch", "pickle", "joblib", "hub"}  # modules whose load function executes code
ALLOWED = {
    "data/loader_pool.py": ["pickle"],  # of what a process and those that it has started exchange
    "weights/timm_filter.py": ["pretrained"],  # where timm's function that loads weights is replaced
}
KEYWORDS = {"allow_pickle", "shell", "trust_remote_code", "pretrained"}  # must be false or absent


def faults(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    safe = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and weights_only(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="load") if id(node) in safe:
                pass
            case ast.Import(names=names):
                yield from (a.name for a in names if a.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in NAMES:
                yield name
            case ast.Attribute(value=ast.Name(id=name), attr="load") if name in LOADS:
                yield f"{name}.load"
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name.startswith(("exec", "spawn")):
                yield f"os.{name}"
            case ast.Attribute(attr=name) if name in CALLS:
                yield name
            case ast.keyword(arg=str(name), value=value) if name in KEYWORDS:
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield name


def weights_only(call: ast.Call) -> bool:
    """Returns True if this torch.load accepts only tensors and plain values."""
    return any(
        keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


def test_modules_call_no_executing_function() -> None:
    assert len(FILES) > 300
    found = {path.relative_to(ROOT).as_posix(): list(faults(path.read_text(encoding="utf-8"))) for path in FILES}
    assert {name: of for name, of in found.items() if of} == ALLOWED


def test_the_search_finds_executing_calls() -> None:
    for source in (
        *("import subprocess", "from pickle import loads", "eval(x)", "os.system(x)", "os.execv(a, b)"),
        *("torch.load(p)", "torch.load(p, weights_only=False)", "torch.load(p, weights_only=x)", "yaml.unsafe_load(x)"),
        *("np.load(p, allow_pickle=True)", "run(x, shell=y)", "tar.extractall()"),
    ):
        assert len(list(faults(source))) == 1, source
    assert list(faults("torch.load(p, weights_only=True)")) == []
