"""The watchdog ends stalled processes and writes their stack traces."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import timeit
from pathlib import Path

import pytest

from clipx.errors import Exit
from clipx.run.watchdog import Watchdog

SCRIPT = """
import ctypes, sys, time
from pathlib import Path
from clipx.run import abort, watchdog
from clipx.run.watchdog import Watchdog

abort.WRITE_S = watchdog.WRITE_S = 1.0

def waits_for_a_file():
    time.sleep(600)

def holds_the_interpreter_lock():
    ctypes.PyDLL(None).sleep(600)

def event(kind, **facts):
    print(kind, facts["rank"], facts["step"], facts["stacks"], flush=True)
    if sys.argv[2] == "event":
        time.sleep(600)

with Watchdog(float(sys.argv[3]), Path(sys.argv[1]), 3, event) as watchdog:
    for step in range(1, 6):
        time.sleep(float(sys.argv[4]))
        watchdog.beat(step)
    {"none": lambda: None, "lock": holds_the_interpreter_lock}.get(sys.argv[2], waits_for_a_file)()
time.sleep(0.8)
print("finished")
"""


def run_watched(
    folder: Path, fault: str, timeout_s: float = 1.5, step_s: float = 0.05
) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.monotonic()
    command = [sys.executable, "-c", SCRIPT, str(folder), fault, str(timeout_s), str(step_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=700, check=False)
    return done, time.monotonic() - start


def test_a_run_with_progress_is_not_ended(tmp_path: Path) -> None:
    done, _ = run_watched(tmp_path, "none", timeout_s=5, step_s=1.2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_stalled_run_ends_with_its_stacks_and_an_event(tmp_path: Path) -> None:
    done, seconds = run_watched(tmp_path, "file")
    assert done.returncode == Exit.WATCHDOG
    assert seconds < 100
    assert done.stdout == "watchdog 3 5 stacks.rank3.txt\n"
    stacks = (tmp_path / "stacks.rank3.txt").read_text()
    line = rf"rank 3 made no progress for \d+ s after step 5, more than distributed.watchdog_s=1.5: see the stack traces in {tmp_path}/stacks.rank3.txt"
    assert re.search(f"^error: {line}", done.stderr)
    assert re.search(line, stacks)
    assert "in waits_for_a_file" in stacks and "in waits_for_a_file" in done.stderr


def test_a_stalled_run_ends_even_if_the_file_system_hangs(tmp_path: Path) -> None:
    done, seconds = run_watched(tmp_path, "event")
    assert done.returncode == Exit.WATCHDOG
    assert seconds < 100
    assert "in waits_for_a_file" in done.stderr


def test_a_stalled_run_ends_even_if_its_threads_cannot_run(tmp_path: Path) -> None:
    done, seconds = run_watched(tmp_path, "lock")
    assert done.returncode == Exit.FAILED
    assert seconds < 100
    assert "in holds_the_interpreter_lock" in done.stderr


def test_a_timeout_of_0_disables_the_watchdog(tmp_path: Path) -> None:
    done, _ = run_watched(tmp_path, "none", 0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")


@pytest.mark.timeout(20)
def test_a_beat_takes_less_than_10_microseconds(tmp_path: Path) -> None:
    with Watchdog(600, tmp_path, 0, print) as watchdog:
        assert min(timeit.repeat(lambda: watchdog.beat(7), number=1000, repeat=5)) / 1000 < 10e-6
