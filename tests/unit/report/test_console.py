"""Text of users on consoles, which is no markup."""

from __future__ import annotations

import ast
import io
from pathlib import Path

from rich.console import Console

import clipx
import clipx_launch
from clipx.report.console import text_table

ODD = ("evaluator=[zeroshot]", "[/x] [bold]", "a :smile: b", "[link=file:///etc]x[/link]")


def test_a_table_is_literal_on_any_console() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(text_table(["[/a]"], [[ODD[1]], ["line\x1b[2J\r\x07\udcff"]], "[/t]"))
    shown = console.file.getvalue()
    for text in ("[/a]", "[/t]", ODD[1], r"line\x1b[2J\r\x07\xff"):
        assert text in shown


# Names of rich that read markup in strings by default. `Live` shows what a console prints.
MARKUP = {"rich", *(f"rich.{name}" for name in "console table progress markup panel prompt text".split())}
PACKAGES = [Path(clipx.__file__).parent, Path(clipx_launch.__file__).parent]


def test_only_the_console_module_creates_consoles_and_tables() -> None:
    found = []
    for path in (path for package in PACKAGES for path in package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        typing = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        ignored = {id(node) for block in typing for node in ast.walk(block)}
        for node in (node for node in ast.walk(tree) if id(node) not in ignored):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [path.name for name in names if name in MARKUP]
    assert set(found) == {"console.py"}
