"""Errors of a file system as one line with the path, the reason and the fix, on all ranks."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from urllib.error import URLError

import pytest
from helpers.cases import refusal
from helpers.savers import run_in_processes
from safetensors import SafetensorError

from clipx.distributed.comm import Comm
from clipx.errors import disk_failure, known_failure
from clipx_launch.__main__ import main

SAFE = "repeat the command: what was complete before is unchanged"


def of(number: int, *path: str) -> OSError:
    return OSError(number, os.strerror(number), *path)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (of(errno.ENOSPC, "/d/a"), "/d/a cannot be read or written (No space left on device): make room, or raise the lim"),
        (of(errno.ENOSPC), "a file cannot be read or written (No space left on device): make room, or raise the limit"),
        (of(errno.EACCES, "/d/a"), "/d/a cannot be read or written (Permission denied): correct its permissions"),
        (of(errno.EROFS, "/d/a"), "/d/a cannot be read or written (Read-only file system): correct its permissions"),
        (of(errno.EIO), "a file cannot be read or written (Input/output error): check the path and the disk"),
        (of(errno.ENOENT, "/d/a"), "/d/a cannot be read or written (No such file or directory): check the path and the"),
        (of(errno.ENAMETOOLONG, "/d/a"), "/d/a cannot be read or written (File name too long): check the path"),
        (of(errno.ELOOP, "/d/a"), "/d/a cannot be read or written (Too many levels of symbolic links): check the path"),
        (of(errno.EBADF, 7), "None"),
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "a file cannot be read or written (No space left on device): make room",
        ),
        (
            OSError("Error writing bytes to file. Detail: [errno 122] Disk quota exceeded"),
            "a file cannot be read or written (Disk quota exceeded): make room",
        ),
        (
            RuntimeError("unable to open file </d/a> in read-only mode: Permission denied (13)"),
            "/d/a cannot be read or written (Permission denied): correct its permissions",
        ),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 128 vs 64"), "a file cannot be read or"),
        (sqlite3.OperationalError("database or disk is full"), "a file cannot be read or written (database or disk is fu"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_file_system_refused_is_one_line(error: Exception, expected: str) -> None:
    found = disk_failure(error)
    assert str(found).startswith(expected)
    assert found is None or str(found).endswith(f"; {SAFE}")


def test_errors_of_networks_and_faults_of_clipx_are_not(tmp_path: Path) -> None:
    errors = [
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), OSError(errno.EIO, "InternalError: try again"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "s3://bucket/key"), URLError("no route to host"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "gcc"), PermissionError("Access denied"),
        TimeoutError("timed out"), ValueError("No such key"), KeyError("x"),
    ]  # fmt: skip
    assert [known_failure(error) for error in errors] == [None] * len(errors)


def _refused(comm: Comm, path: Path) -> str:
    return refusal(comm.run_on_main, (path / "missing" / "file").read_text)


def test_an_error_of_rank_0_reaches_all_ranks(tmp_path: Path) -> None:
    """Else the others would wait for it until the time limit of the process group."""
    first, second = run_in_processes(2, tmp_path, _refused, tmp_path)
    assert first == second
    assert first.startswith(f"DiskError: {tmp_path}/missing/file cannot be read or written (No such file or directory)")


def test_clipx_sweep_reports_it_as_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(**options: object) -> None:
        raise of(errno.EIO, "/d/sweep.json")

    monkeypatch.setattr("clipx_launch.commands.status.show", failing)
    assert main(["status"]) == 1
    reason = "/d/sweep.json cannot be read or written (Input/output error): check the path and the disk"
    assert capsys.readouterr() == ("", f"error: {reason}; {SAFE}\n")
