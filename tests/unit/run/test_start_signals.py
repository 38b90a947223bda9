"""Signals before training begins, and of loader processes. Stopping of whole runs: faults/test_stopping.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import SMALL, VIT, small
from helpers.waiting import wait_until

from clipx.errors import Exit
from clipx.run.lock import RunLock
from clipx.run.signals import StopSignals
from clipx.trainer.trainer import Trainer

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


def test_a_forked_process_is_ended_by_its_signal_and_the_process_is_not() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=6000, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("child 15\n", "", 0)


# Makes the first heavy import last, so that the signal arrives during it.
SLOW_IMPORT = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "hydra", "omegaconf", "yaml", "numpy"):
            time.sleep(600)

sys.meta_path.insert(0, Slow())
"""


def test_a_starting_run_ends_with_the_requeue_code(tmp_path: Path) -> None:
    """Sends SIGTERM to a command that handles the signal and imports."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "clipx.train", *SMALL, f"run_dir={tmp_path}/run"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    try:
        status = Path(f"/proc/{started.pid}/status")
        wait_until(lambda: started.poll() is not None or _handles(status.read_text(), signal.SIGTERM))
        started.send_signal(signal.SIGTERM)
        _, err = started.communicate(timeout=600)
    finally:
        started.kill()
    assert started.returncode == Exit.REQUEUE
    # Before it, Python may report that it dropped the exception within a callback; a thread then ends the process.
    assert err.endswith("stopped: SIGTERM before training began: nothing to save, start it again\n")


def _handles(status: str, number: int) -> bool:
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) & 1 << (number - 1))


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


def test_a_signal_while_a_run_closes_its_files_does_not_reach_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of submitit would requeue a run that is finished."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    release = RunLock.release

    def signalled(lock: RunLock) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        release(lock)

    monkeypatch.setattr(RunLock, "release", signalled)
    try:
        assert Trainer(small(tmp_path, *VIT, "checkpoint=none", "duration=2st")).fit()["step"] == 2
        assert received == [] and not (tmp_path / "run.lock").exists()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert received == [signal.SIGUSR2], "the handler of the program was not restored"
    finally:
        signal.signal(signal.SIGUSR2, before)
