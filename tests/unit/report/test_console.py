"""Console output on a real pseudo-terminal and in a pipe."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import pty
import sys
import threading
from pathlib import Path

import pytest
from helpers.runs import VIT, small
from rich.console import Console

import clipx
import clipx_launch
from clipx.report.console import Screen, format_clock, format_value, stdout_console, text_table
from clipx.trainer.trainer import Trainer


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("eval/zeroshot/top1", 0.5, "50.00%"), ("eval/x/recall@5", 1.0, "100.00%"), ("eval/x/median_rank", 12.0, "12"),
        ("samples", 107776.0, "107,776"), ("train/loss", 0.51823, "0.5182"), ("train/loss", -0.25, "-0.25"),
        ("train/lr", 0.0001, "1e-4"), ("train/lr", 1e30, "1e30"), ("train/loss", float("nan"), "nan"),
    ],
)  # fmt: skip
def test_values_are_formatted_by_metric(name: str, value: float, shown: str) -> None:
    assert format_value(name, value) == shown
    assert list(map(format_clock, (0, 61.4, 3723, -5))) == ["00:00", "01:01", "1:02:03", "00:00"]


def test_a_pipe_gets_plain_lines_with_all_values(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Trainer(small(tmp_path / "run", *VIT)).fit()
    out = capfd.readouterr().out
    assert "\x1b" not in out
    lines = [line for line in out.splitlines() if line.startswith("step ") and "ETA" in line]
    assert len(lines) == 4
    for part in ("4/4", "epoch 0.50", "loss ", "samples/s (", "/device)", "data wait ", "lr ", "τ 0.07", "ETA 00:00"):
        assert part in lines[-1]
    assert "global batch 32 = 32 x 1 ranks" in out
    assert "128 samples = 0.5 epochs = 4 steps" in out
    assert out.endswith("/run: metrics.jsonl, checkpoints/\n"), "no report was requested"


def test_a_terminal_gets_a_live_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main_end, process_end = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while True:
                shown.append(os.read(main_end, 65536))

    reader = threading.Thread(target=read)
    reader.start()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "180")
    with os.fdopen(process_end, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        Trainer(small(tmp_path / "run", *VIT, "checkpoint=none")).fit()
    reader.join()
    os.close(main_end)
    assert b"\x1b[" in b"".join(shown), "the line must be redrawn in place"
    assert b"samples/s" in b"".join(shown)


ODD = ("evaluator=[zeroshot]", "[/x] [bold]", "a :smile: b", "[link=file:///etc]x[/link]")


def test_text_of_users_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console = stdout_console()
    for text in ODD:
        console.print(text)
    console.print(text_table([text.upper() for text in ODD], [ODD], title="[/] of a :cat:"))
    screen = Screen(shown=True)
    screen.print(ODD[1])
    screen.table("[/title]", {"eval/[red]/top1": 0.5})
    shown = capsys.readouterr().out
    for text in (*ODD, *(odd.upper() for odd in ODD), "[/] of a :cat:", "[/title]", "eval/[red]/top1"):
        assert text in shown


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
