"""Names and messages with any bytes: printed, logged and written as one line of printable characters."""

from __future__ import annotations

import io
import json
import logging

import pytest
from rich.console import Console

from clipx.cli import print_error
from clipx.errors import DataError
from clipx.escape import EscapedLogRecord, announce, escaped, json_text, shortened
from clipx.report.console import text_table

NAME = b"caf\xe9\n\x1b[31m".decode("utf-8", "surrogateescape")
SHOWN = r"caf\xe9\n\x1b[31m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, τ 猫 💡", "plain text, τ 猫 💡"),
        (NAME, SHOWN),
        ("half \ud83d", r"half \ud83d"),
        ("a\u2028b\u202ec\x85\r\0", r"a\u2028b\u202ec\x85\r\x00"),
        ("back\\slash", "back\\slash"),
    ],
)
def test_text_is_escaped_to_one_printable_line(text: str, shown: str) -> None:
    assert escaped(text) == shown
    assert escaped(shown) == shown


@pytest.mark.parametrize("text", ["plain τ 猫", 'quotes " and \\', "a\nb\t\x1b", "\x85\u2028\u202e\U000e0041"])
def test_json_text_is_printable_and_reads_back_equal(text: str) -> None:
    written = json_text({text: [text]})
    assert written.isprintable()
    assert json.loads(written) == {text: [text]}
    assert json.loads(json_text({"sample": NAME})) == {"sample": NAME.replace("\udce9", r"\xe9")}


def test_errors_and_log_lines_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(DataError(f"{NAME}: no image"), full=False)
    assert capsys.readouterr().err == f"error: {SHOWN}: no image\n"
    for name, shown in (("clipx.data", rf"a\nb {SHOWN}"), ("torch", "a\nb " + SHOWN.replace(r"\n", "\n"))):
        record = EscapedLogRecord(name, logging.WARNING, "file", 1, "a\nb %s", (NAME,), None)
        assert logging.Formatter().format(record) == shown


def test_a_table_is_literal_on_any_console() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(text_table(["[/a]"], [["[/x] [bold]"], ["line\x1b[2J\r\x07\udcff"]], "[/t]"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("[/a]", "[/t]", "[/x] [bold]", r"line\x1b[2J\r\x07\xff"):
        assert text in shown


def test_only_large_files_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    announce("reading step-00000001", 999_999_999)
    announce("reading step-\n", 12_340_000_000)
    assert capsys.readouterr().err == "reading step-\\n: 12.3 GB\n"


def test_a_message_repeats_no_long_value() -> None:
    rule = "must be in [0, 2^63): give 0 or more"
    assert shortened(f"seed=-1 {rule}") == f"seed=-1 {rule}"
    for value in ("9" * 100_000, "[" + "1, " * 30_000 + "1]"):
        said = shortened(f"seed={value} {rule}")
        assert said.startswith(f"seed={value[:100]}") and said.endswith(rule) and len(said) <= 2_000
