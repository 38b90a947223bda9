"""Ends a rank whose launcher is gone: after a SIGKILL of torchrun, ranks would hold their GPUs and the run's lock."""

from __future__ import annotations

import os
import threading
import time

from clipx.errors import PeerLost
from clipx.run.abort import abort
from clipx.run.process import environment_of, parent_of, process_stat

LAUNCHER_PID = "CLIPX_LAUNCHER_PID"  # set by clipx_local for the processes of its points

_TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
_POLL_S = 1.0


def watch_launcher() -> None:
    """Starts a thread that ends this process with PeerLost's exit code when its launcher has ended.

    Does nothing for a process that neither torchrun nor clipx_local started. PR_SET_PDEATHSIG does not serve: it also
    fires when the launcher's thread that started the process ends, and cannot say why.
    """
    launcher = find_launcher()
    if launcher is not None:
        born = process_stat(launcher)[1]
        threading.Thread(target=_watch, args=(launcher, born), name="launcher", daemon=True).start()


def find_launcher() -> int | None:
    """Returns the pid of the torchrun agent or of the clipx_local that started this process, else None."""
    if _TORCHRUN_ID in os.environ:
        # The nearest ancestor outside of torchrun's environment: a wrapper script may be in between.
        pid, mark = os.getppid(), f"{_TORCHRUN_ID}={os.environ[_TORCHRUN_ID]}"
        while pid > 1 and mark in environment_of(pid):
            pid = parent_of(pid)
        return pid if pid > 1 else os.getppid()
    pid = int(text) if (text := os.environ.get(LAUNCHER_PID, "")).isdecimal() else 0
    return pid if pid == os.getppid() else None  # else inherited by a process that was started by hand


def _watch(launcher: int, born: str) -> None:
    parent = os.getppid()
    while _is_alive(launcher, born, parent):
        time.sleep(_POLL_S)
    reason = (
        f"the launcher of this process, pid {launcher}, has ended: the process ends without saving; check the "
        "launcher's output, and continue with resume=auto"
    )
    abort(reason, PeerLost.exit_code)


def _is_alive(pid: int, born: str, parent: int) -> bool:
    """Returns whether a process of this start time runs. Without /proc, whether the parent is still `parent`."""
    state, now_born = process_stat(pid)
    if not born:
        return os.getppid() == parent
    return state not in ("", "Z", "X") and now_born == born
