"""A rank ends with its launcher; a process that was started by hand does not end with its shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import is_running
from helpers.waiting import wait_until

from clipx.run.watchdog import LAUNCHER_PID, find_launcher

RANK = """
import os, sys, threading, time
from pathlib import Path
from clipx.run import process, watchdog

folder = Path(sys.argv[1])
watchdog._POLL_S, process.WRITE_S = 0.05, 600
process.add_reporter(lambda reason, code: (folder / "end").write_text(f"{code} {reason}"))
watchdog.watch_launcher()
(folder / "pid.partial").write_text(f"{os.getpid()} {watchdog.find_launcher()} {threading.active_count()}")
(folder / "pid.partial").rename(folder / "pid")
time.sleep(600)
"""
# Starts its arguments as a rank, directly or in a wrapper, and waits.
LAUNCHER = """
import os, subprocess, sys
variables = {"LAUNCHER_PID": str(os.getpid())} if sys.argv[1] == "clipx_local" else {"TORCHELASTIC_RUN_ID": "none"}
variables = {name.replace("LAUNCHER_PID", "CLIPX_LAUNCHER_PID"): value for name, value in variables.items()}
wrapper = ["bash", "-c", '"$@"; true', "bash"] if sys.argv[1] == "wrapper" else []
subprocess.run([*wrapper, *sys.argv[2:]], env={**os.environ, **variables}, start_new_session=True)
"""


@pytest.mark.parametrize("kind", ["wrapper", "clipx_local"])
def test_a_rank_ends_with_the_code_of_a_lost_peer_when_its_launcher_is_killed(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", LAUNCHER, kind, sys.executable, "-c", RANK, str(tmp_path)]
    with (tmp_path / "err").open("w") as err, subprocess.Popen(command, stderr=err) as launcher:
        try:
            wait_until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
            pid, watched, threads = map(int, (tmp_path / "pid").read_text().split())
            assert (watched, threads) == (launcher.pid, 2)
        finally:
            launcher.kill()
    wait_until(lambda: not is_running(pid))
    reason = (
        f"the launcher of this process, pid {launcher.pid}, has ended: the process ends without saving; check the "
        "launcher's output, and continue with resume=auto"
    )
    assert (tmp_path / "end").read_text() == f"1 {reason}"
    assert (tmp_path / "err").read_text() == f"error: {reason}\n"


@pytest.mark.parametrize("variables", [{}, {LAUNCHER_PID: "1234567"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_a_process_started_by_hand_has_no_launcher(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in (LAUNCHER_PID, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_launcher() is None
