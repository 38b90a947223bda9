"""Standard streams that are full, closed, hung up or non-blocking: a run goes on, other commands end with one line."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import SCRIPTS
from helpers.cases import slow_except
from helpers.runs import SMALL, VIT, rows, run

from clipx import output

RUN = (*SMALL, *VIT, "data.samples=64", "duration=2st", "schedule.warmup=0st", "checkpoint=none")
STREAMS = [
    (("1=full",), "No space left on device"),
    (("1=closed",), "Bad file descriptor"),
    (("1=terminal", "2=terminal"), None),
    (("1=closed", "2=closed", "0=closed"), None),
    (("1=pipe",), None),
    (("2=full",), None),
]
RESULTS = [
    ("clipx.train", "--help"),
    ("clipx.train", "--version"),
    ("clipx.train", "--cfg", "job"),
    ("clipx.plan", "--help"),
    ("clipx.bench",),
    ("clipx_launch", "--help"),
    ("clipx_launch", "script", "--help"),
    ("clipx_launch", "status", "."),
]


def command(streams: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, str(SCRIPTS / "streams.py"), *streams, "--", *words, check=False)


@pytest.mark.parametrize("case", slow_except(STREAMS, *STREAMS[:2]), ids=str)
def test_a_run_goes_on_without_its_output(tmp_path: Path, case: tuple[tuple[str, ...], str | None]) -> None:
    """Nor does what it prints reach a file that got the number of a closed stream."""
    streams, reason = case
    done = command(streams, "clipx.train", *RUN, f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    warned = f"warning: standard output cannot be written ({reason}): the command goes on, and discards what it prints"
    lines = [line for line in done.stderr.splitlines() if line.startswith(("warning", "error", "Traceback", "---"))]
    assert lines == ([f"{warned} there"] if reason else [])
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    for file in filter(Path.is_file, (tmp_path / "run").rglob("*")):
        assert b"global batch" not in file.read_bytes()


@pytest.mark.parametrize("words", slow_except(RESULTS, RESULTS[0], RESULTS[5]), ids=" ".join)
@pytest.mark.parametrize(("kind", "reason"), [("full", "No space left on device"), ("closed", "Bad file descriptor")])
def test_a_command_that_prints_its_result_fails_with_one_line(words: tuple[str, ...], kind: str, reason: str) -> None:
    done = command((f"1={kind}",), *words)
    assert done.stderr == f"error: standard output cannot be written ({reason}): write it to another file or pipe\n"
    assert done.returncode == 1


def test_the_end_of_the_reader_is_no_error() -> None:
    done = command(("1=pipe",), "clipx_launch", "--help")
    assert (done.returncode, done.stderr) == (141, "")


def test_a_non_blocking_stream_is_waited_for() -> None:
    """Another program that shares a terminal or a pipe may set it so; a buffered stream would raise an error."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    received: list[bytes] = []

    def read() -> None:
        while block := os.read(reader, 1 << 16):
            received.append(block)

    thread = threading.Thread(target=read)
    text = b"x" * (1 << 20)  # 16 times the size of the pipe
    with io.BufferedWriter(output._Stream(writer, "w")) as stream:  # type: ignore[type-var]
        thread.start()
        stream.write(text)
    thread.join()
    assert b"".join(received) == text
    os.close(reader)


def test_output_continues_when_the_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_loses", True)
    monkeypatch.setattr(output, "_told", True)
    with capfd.disabled(), (tmp_path / "log").open("wb") as log, open("/dev/full", "wb") as full:  # noqa: PTH123
        kept = os.dup(1)
        stream = output._Stream(1, "w", closefd=False)
        try:
            for file, line in ((log, b"one\n"), (full, b"lost\n"), (log, b"two\n")):
                os.dup2(file.fileno(), 1)
                assert stream.write(memoryview(line)) == len(line)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"
