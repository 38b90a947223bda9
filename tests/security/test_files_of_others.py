"""Links and named pipes that another user put where clipx writes: they are refused or replaced, never followed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from helpers import ROOT

CALLS = {  # that open a path for writing, followed links included
    *("write_text", "write_bytes", "touch", "copy", "copy2", "copyfile", "copytree", "save_file", "write_table"),
    *("export_chrome_trace", "savefig", "tofile"),
}
NEW = "writes into a folder, or to a path, that this call has just made"
EXCEPT = {  # function: why it may open a path otherwise
    "clipx/bench/measure.py:reset_peak_memory": "a file of the kernel",
}


def mode_of(call: ast.Call) -> str:
    """Returns the mode of an `open`, of the built-in or of a path. A mode that is not a constant is any."""
    place = 1 if isinstance(call.func, ast.Name) else 0
    given = next((key.value for key in call.keywords if key.arg == "mode"), None)
    found = given or (call.args[place] if len(call.args) > place else ast.Constant("r"))
    return str(found.value) if isinstance(found, ast.Constant) else "w"


def opens_for_writing(call: ast.Call) -> bool:
    """Returns whether a call may open an existing path for writing. Mode x, O_EXCL, never does."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    text = ast.unparse(call)
    if text.startswith("os.open("):
        return any(flag in text for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "flags")) and "O_EXCL" not in text
    if name in ("open", "fdopen"):
        return bool(set("wa+") & set(mode_of(call)))
    return isinstance(call.func, ast.Attribute) and (name in CALLS or text.startswith("torch.save("))


def functions(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yields each call with its place FILE:FUNCTION, the innermost one with a name."""

    def walk(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield f"{path.relative_to(ROOT)}:{inside}", child
            yield from walk(child, getattr(child, "name", inside) if isinstance(child, ast.FunctionDef) else inside)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), "")


def test_files_are_opened_for_writing_in_one_way() -> None:
    """By `open_own` and `write_atomically`, or as new files, by mode x."""
    sources = [path for part in ("clipx", "launch") for path in sorted((ROOT / part).rglob("*.py"))]
    found = {place: call for path in sources for place, call in functions(path) if opens_for_writing(call)}
    other = {place: ast.unparse(call) for place, call in found.items() if place not in EXCEPT}
    assert not other
    assert not EXCEPT.keys() - found.keys()
