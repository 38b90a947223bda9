"""One job at a time in a run directory, tested with real processes."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.savers import run_in_processes
from helpers.waiting import wait_until

from clipx.distributed.comm import Comm
from clipx.errors import Exit, Locked
from clipx.processes import process_stat
from clipx.run import lock as module
from clipx.run.lock import Holder, RunLock


class Events(list[dict[str, Any]]):
    def __call__(self, kind: str, **facts: Any) -> None:
        self.append({"event": kind, **facts})


@pytest.fixture
def events() -> Events:
    return Events()


def write_lock(folder: Path, holder: Holder, age_s: float = 0) -> Path:
    """Writes a lock as its holder refreshed it `age_s` ago."""
    path = folder / "run.lock"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(holder)))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def dead_holder() -> Holder:
    """Returns a holder whose process on this machine has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return replace(Holder.current(), id="old", pid=process.pid)


SLOW = 10_000  # the ages of locks are multiplied by it, so that the time that a test takes does not count
ELSEWHERE = replace(Holder.current(), id="old", host="n7", pid=12, machine="another", job="77.0")


def compete(comm: Comm, folder: Path, stale: bool) -> list[str]:
    """Takes locks at the same time as the other process, at least 20, until each process has won one. Returns results."""
    found: list[str] = []
    winners: set[int] = set()
    while len(found) < 20 or (len(winners) < 2 and len(found) < 1000):
        run = folder / str(len(found))
        if stale and comm.is_main:
            write_lock(run, dead_holder())
        lock = RunLock(run, lambda kind, run=run, **facts: (run / "events").write_text(kind))  # type: ignore[misc]
        comm.barrier()
        time.sleep(random.uniform(0, 1e-3))
        try:
            lock.acquire()
            found.append("mine")
        except Locked as error:
            found.append(f"{error.exit_code} {error}")
        comm.barrier()
        lock.release()
        winners.add(comm.gather_objects(found[-1]).index("mine"))
    return [str(os.getpid()), *found]


@pytest.mark.parametrize("stale", [False, True], ids=["no lock", "a stale lock"])
def test_exactly_one_of_two_simultaneous_jobs_gets_the_directory(tmp_path: Path, stale: bool) -> None:
    runs = tmp_path / "runs"
    (one, *first), (other, *second) = run_in_processes(2, tmp_path, compete, runs, stale)
    for n, answers in enumerate(zip(first, second, strict=True)):
        refused, winner = (answers[1], one) if answers[0] == "mine" else (answers[0], other)
        assert sorted(answers)[1] == "mine" != refused
        assert refused.startswith(f"{int(Exit.IN_USE)} {runs / str(n)} is in use by pid {winner} on ")
        assert not stale or (runs / str(n) / "events").read_text() == "lock_taken_over"
        assert [path.name for path in (runs / str(n)).iterdir()] == (["events"] if stale else [])
    assert "mine" in first and "mine" in second, "the two jobs did not compete"


HOLDERS = {
    "a process of the same number": (replace(Holder.current(), id="old", born="1"), 0, "", True),
    "a live process": (replace(Holder.current(), id="old", pid=1, born=process_stat(1).born), 700, "", False),
    "refreshed 500 s ago elsewhere": (ELSEWHERE, 500, "", False),
    "not for 700 s": (ELSEWHERE, 700, "", True),
    "this job, started anew": (ELSEWHERE, 0, "77.1", True),
    "this task of an array, started anew": (replace(ELSEWHERE, job="77_3.0"), 0, "77_3.1", True),
    "another task of the array": (replace(ELSEWHERE, job="77_3.0"), 0, "77_4.1", False),
    "another node of this job": (ELSEWHERE, 0, "77.0", False),
    "another job": (ELSEWHERE, 0, "78.1", False),
    "no job": (replace(ELSEWHERE, job=""), 0, "", False),
}


@pytest.mark.parametrize(("holder", "age_s", "job", "taken"), HOLDERS.values(), ids=HOLDERS)
def test_stale_locks_are_taken_over_and_live_locks_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events, holder: Holder, age_s: float, job: str, taken: bool
) -> None:
    if job:
        number, _, restart = job.partition(".")
        array, _, task = number.partition("_")
        own = {"SLURM_JOB_ID": "99" if task else number, "SLURM_RESTART_COUNT": restart}
        own |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task} if task else {}
        for name, value in own.items():
            monkeypatch.setenv(name, value)
    assert module._STALE_S == 600
    monkeypatch.setattr(module, "_STALE_S", 600 * SLOW)
    path = write_lock(tmp_path, holder, SLOW * age_s)
    lock = RunLock(tmp_path, events)
    error = None
    try:
        lock.acquire()
    except Locked as raised:
        error = raised
    assert (error is None) is taken
    if error is None:
        assert events[0]["of"] == asdict(holder)
        assert -1 <= events[0]["silent_s"] - SLOW * age_s < 5 * SLOW
        lock.release()
        assert not path.exists()
        return
    assert error.exit_code == 3
    assert f"pid {holder.pid} on {holder.host}" in str(error)
    assert (f"SLURM job {holder.job.partition('.')[0]}," in str(error)) == bool(holder.job)
    lock.release()
    assert json.loads(path.read_text()) == asdict(holder)


def test_an_unreadable_lock_is_stale_by_its_age(tmp_path: Path, events: Events) -> None:
    for content in ("", '{"id": "o', '{"pid": 12}'):
        path = write_lock(tmp_path, ELSEWHERE)
        path.write_text(content)
        with pytest.raises(Locked, match=f"an unknown job.*delete {re.escape(str(path))}"):
            RunLock(tmp_path, events).acquire()
        os.utime(path, (0, 0))
        with RunLock(tmp_path, events):
            assert events.pop()["of"] is None, content


def test_a_holder_refreshes_its_lock_and_detects_a_takeover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    monkeypatch.setattr(module, "_HEARTBEAT_S", 0.02)
    path = tmp_path / "run.lock"
    with RunLock(tmp_path, events) as lock:
        os.utime(path, (0, 0))
        wait_until(lambda: path.stat().st_mtime > time.time() - 60)
        lock.check()
        write_lock(tmp_path, ELSEWHERE)
        wait_until(lambda: lock._lost)
        with pytest.raises(Locked, match="was taken over by another job"):
            lock.check()
    assert events == []
    assert path.is_file(), "another job's lock must not be removed"
    assert json.loads(path.read_text())["id"] == "old"
