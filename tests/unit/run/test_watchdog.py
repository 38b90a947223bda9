"""The watchdog ends stalled processes and writes their stack traces."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from clipx.errors import Exit

SCRIPT = """
import ctypes, sys, time
from pathlib import Path
from types import SimpleNamespace
from clipx import abort
from clipx.run import watchdog as module
from clipx.run.watchdog import Watchdog

timeout_s, fault = float(sys.argv[3]), sys.argv[2]
now = 0.0  # the watchdog's clock, so that its thread may come late
module.time = SimpleNamespace(monotonic=lambda: now, strftime=time.strftime)
module.WRITE_S = 1.0 if fault == "lock" else 600.0  # time of the timer in C after the thread's
abort.WRITE_S = 1.0 if fault == "event" else 600.0

def waits_for_a_file():
    global now
    now += 10 * timeout_s
    time.sleep(600)

def event(kind, **facts):
    print(kind, facts["rank"], facts["step"], facts["stacks"], flush=True)
    if fault == "event":
        time.sleep(600)

def holds_the_interpreter_lock():
    with Watchdog(timeout_s, Path(sys.argv[1]), 3, event):
        ctypes.PyDLL(None).sleep(600)  # at once: the thread has not had a turn

if fault == "lock":
    holds_the_interpreter_lock()
with Watchdog(timeout_s, Path(sys.argv[1]), 3, event) as watchdog:
    for step in range(1, 6):
        time.sleep(0.5)  # two turns of the thread
        watchdog.beat(step)
        now += 0.8 * timeout_s
        watchdog.beat(step)
    if fault != "none":
        waits_for_a_file()
now += 10 * timeout_s
time.sleep(0.8)
print("finished")
"""


def run_watched(folder: Path, fault: str, timeout_s: float = 1.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), fault, str(timeout_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=700, check=False)


def test_a_run_with_progress_is_not_ended(tmp_path: Path) -> None:
    done = run_watched(tmp_path, "none")
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")
    assert list(tmp_path.iterdir()) == []
    disabled = run_watched(tmp_path, "none", 0)
    assert (disabled.returncode, disabled.stdout, disabled.stderr) == (0, "finished\n", "")


def test_a_stalled_run_ends_with_its_stacks_and_an_event(tmp_path: Path) -> None:
    done = run_watched(tmp_path, "file")
    assert done.returncode == Exit.WATCHDOG
    assert done.stdout == "watchdog 3 5 stacks.rank3.txt\n"
    stacks = (tmp_path / "stacks.rank3.txt").read_text()
    line = rf"rank 3 made no progress for \d+ s after step 5, more than distributed.watchdog_s=1: see the stack traces in {re.escape(str(tmp_path))}/stacks.rank3.txt"
    assert re.search(f"^error: {line}", done.stderr)
    assert re.search(line, stacks)
    assert "in waits_for_a_file" in stacks and "in waits_for_a_file" in done.stderr


def test_a_stalled_run_ends_even_if_its_threads_cannot_run(tmp_path: Path) -> None:
    done = run_watched(tmp_path, "lock", timeout_s=10)
    assert done.returncode == Exit.FAILED
    assert "in holds_the_interpreter_lock" in done.stderr
