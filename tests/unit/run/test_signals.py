"""Signals before training begins, and of loader processes. Stopping of whole runs: faults/test_stopping.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.runs import SMALL
from helpers.waiting import wait_until

from clipx.errors import Exit
from clipx.run.signals import StopSignals

FORK = """
import os, signal, time
from clipx.run import signals

def fork():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"1")
        time.sleep(600)
        os._exit(0)
    os.read(reader, 1)
    os.kill(pid, signal.SIGTERM)
    print("child", os.waitpid(pid, 0)[1], flush=True)
    time.sleep(0.5)

signals._UNWIND_S = 0.2
signals.StartSignals().run(fork)
"""


@contextmanager
def process(*command: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def test_a_forked_process_is_ended_by_its_signal_and_the_process_is_not() -> None:
    with process("-c", FORK) as started:
        out, err = started.communicate(timeout=6000)
    assert (out, err, started.returncode) == ("child 15\n", "", 0)


# Makes the first heavy import last, so that the signal arrives during it.
SLOW_IMPORT = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "hydra", "omegaconf", "yaml", "numpy"):
            time.sleep(600)

sys.meta_path.insert(0, Slow())
"""


def stopped_while_starting(folder: Path, command: Sequence[str]) -> tuple[int, str]:
    """Sends SIGTERM to a command that handles the signal and imports. Returns its exit code and stderr."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SLOW_IMPORT)
    path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with process(*command, PYTHONPATH=path) as started:
        status = Path(f"/proc/{started.pid}/status")
        wait_until(lambda: started.poll() is not None or _handles(status.read_text(), signal.SIGTERM))
        started.send_signal(signal.SIGTERM)
        _, err = started.communicate(timeout=600)
    return started.returncode, err


def _handles(status: str, number: int) -> bool:
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) & 1 << (number - 1))


def test_a_starting_run_ends_with_the_requeue_code(tmp_path: Path) -> None:
    command = ("-m", "clipx.train", *SMALL, f"run_dir={tmp_path}/run")
    code, err = stopped_while_starting(tmp_path, command)
    assert code == Exit.REQUEUE
    # Before it, Python may report that it dropped the exception within a callback; a thread then ends the process.
    assert err.endswith("stopped: SIGTERM before training began: nothing to save, start it again\n")


def test_a_forked_process_ignores_the_signals(capfd: pytest.CaptureFixture[str]) -> None:
    """A SIGINT of the terminal, or a SLURM signal to the whole step, reaches loader processes as well."""
    with StopSignals() as stop:
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0 if stop.received is None else 1)
        assert os.waitpid(pid, 0)[1] == 0
    assert capfd.readouterr().err == ""
