"""Names and messages with any bytes: printed, logged and written as one line of printable characters."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from helpers.samples import captions, img2dataset, jpeg, write_tar

from clipx.cli import print_error
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import DataError
from clipx.escape import EscapedLogRecord, escaped, json_text
from clipx.report.console import stdout_console
from clipx.run.directory import RunDir

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


def latin1_tar(path: Path) -> Path:
    """Writes a tar whose second sample has no caption and a name that is not UTF-8."""
    return write_tar(path, [*img2dataset([0]), (f"{NAME}.jpg", jpeg()), *img2dataset([1])])


def test_a_name_that_is_not_utf8_is_quarantined_escaped(tmp_path: Path) -> None:
    shard = latin1_tar(tmp_path / NAME / "a.tar")
    source = WebDatasetSpec(name="x", shards=f"{tmp_path}/*/a.tar", held_out_share=0.0).open().train
    assert captions(source) == ["caption 0", "caption 1"]
    rundir = RunDir(tmp_path)
    rundir.quarantine(source.bad)
    rundir.event("bad", sample=source.bad[0].key)
    (line,) = (tmp_path / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    assert line.isprintable()
    expected = f"{shard}:{NAME}".replace("\udce9", r"\xe9")
    assert json.loads(line) == {"sample": expected, "reason": "caption is missing or empty"}
    assert json.loads((tmp_path / "events.jsonl").read_bytes())["sample"] == expected


def test_errors_and_log_lines_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(DataError(f"{NAME}: no image"), full=False)
    assert capsys.readouterr().err == f"error: {SHOWN}: no image\n"
    for name, shown in (("clipx.data", rf"a\nb {SHOWN}"), ("torch", "a\nb " + SHOWN.replace(r"\n", "\n"))):
        record = EscapedLogRecord(name, logging.WARNING, "file", 1, "a\nb %s", (NAME,), None)
        assert logging.Formatter().format(record) == shown


def test_the_console_reads_no_markup_in_names(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table(title=f"[/x] {NAME}")
    table.add_column("name")
    table.add_row(f"[zeroshot] :smile: {NAME}")
    stdout_console().print(table)
    stdout_console().print(f"[bold] {NAME}")
    out = capsys.readouterr().out
    for shown in (f"[/x] {SHOWN}", f"[zeroshot] :smile: {SHOWN}", f"[bold] {SHOWN}\n"):
        assert shown in out
