"""Errors of exhausted resources as one line, raised by the system in processes with a low limit."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from helpers import CODE

from clipx.errors import exhausted

# What a process does with a low limit of a resource, and what its error says.
PROCESSES = [
    (
        "NOFILE, (20, 20)",
        "[open(os.devnull) for _ in range(20)]",
        "a process needs more than the 20 open files that it",
    ),
    (
        "AS, (1 << 29, 1 << 29)",
        "bytearray(1 << 30)",
        "a process needs more than the 0.5 GB of address space that it may",
    ),
    (
        "AS, (1 << 29, 1 << 29)",
        "[threading.Thread(target=time.sleep, args=(600,), daemon=True).start() for _ in range(999)]",
        "a process needs another process or thread than it may start: raise ulimit -u, ulimit -v or pids.max",
    ),
]
TEXTS = [
    ("received 0 items of ancdata", "open files"),
    ("unable to open shared memory object </torch_1_2_3> in read-write mode: Too many open files (24)", "open files"),
    ("unable to mmap 8 bytes from file </torch_1_2_3>: Cannot allocate memory (12)", "memory that is available"),
    ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 25296896 bytes.", "(25.3 MB at once)"),
    ("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)", "/dev/shm"),
]


@pytest.mark.parametrize(("limit", "call", "expected"), PROCESSES)
def test_an_exhausted_resource_is_named_with_its_limit_and_the_fix(limit: str, call: str, expected: str) -> None:
    program = (
        "import os, resource, sys, threading, time; from clipx.errors import exhausted\n"
        f"resource.setrlimit(resource.RLIMIT_{limit})\n"
        f"try: {call}\n"
        "except Exception as error: print(exhausted(error), flush=True)\n"
        "os._exit(0)\n"
    )
    env = {**os.environ, "PYTHONPATH": CODE, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    (line,) = done.stdout.splitlines()
    assert line.startswith(expected), done.stderr
    assert "raise" in line


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_errors_of_torch_without_a_number_are_recognised(text: str, expected: str) -> None:
    for shown in (text, f"Caught RuntimeError in DataLoader worker process 0.\nTraceback\n{text}"):
        assert expected in str(exhausted(RuntimeError(shown)))


def test_other_errors_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipx.errors._free_bytes", lambda folder: 1 << 30)
    full = OSError(errno.ENOSPC, "No space left on device")  # of a disk
    missing, busy = FileNotFoundError(2, "x", "shared memory"), BlockingIOError(errno.EAGAIN, "x", "a file")
    for error in (full, missing, busy, RuntimeError("shared memory"), ValueError("Too many open files")):
        assert exhausted(error) is None
    monkeypatch.setattr("clipx.errors._free_bytes", lambda folder: 0)
    assert "/dev/shm" in str(exhausted(full))
