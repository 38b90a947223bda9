"""One job at a time in a run directory, tested with real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.waiting import wait_until

from clipx.distributed.comm import Comm
from clipx.errors import Exit, Locked
from clipx.run import lock as module
from clipx.run.lock import Holder, RunLock
from clipx.run.process import process_stat

COMM = Comm(0, 1, 0, torch.device("cpu"))

# For each folder and time on stdin: tries to take the lock at that time, prints the result, and waits.
COMPETITOR = """
import sys, time
from pathlib import Path
from clipx.distributed import Comm
from clipx.errors import ClipxError
from clipx.run.lock import RunLock

print("ready", flush=True)
for line in sys.stdin:
    folder, start = line.rsplit(maxsplit=1)
    lock = RunLock(Path(folder), Comm(0, 1, 0, None), lambda kind, **facts: (Path(folder) / "events").open("a").write(kind + "\\n"))
    while time.time() < float(start):
        pass
    try:
        lock.acquire()
        print("mine", flush=True)
    except ClipxError as error:
        print(error.exit_code, error, flush=True)
    sys.stdin.readline()
    lock.release()
    print("done", flush=True)
"""


@pytest.fixture
def competitors() -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-c", COMPETITOR]
    two = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        assert [read_line(one) for one in two] == ["ready", "ready"]
        yield two
    finally:
        for one in two:
            one.kill()
            one.communicate()


def send(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def no_event(kind: str, **facts: Any) -> None:
    raise AssertionError(kind)


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


@pytest.mark.parametrize("stale", [False, True], ids=["no lock", "a stale lock"])
def test_exactly_one_of_two_simultaneous_jobs_gets_the_directory(
    tmp_path: Path, competitors: list[subprocess.Popen[str]], stale: bool
) -> None:
    winners: set[int] = set()
    n = 0
    while n < 20 or (len(winners) < 2 and n < 1000):  # which one wins depends on the machine's load
        n += 1
        folder = tmp_path / str(n)
        if stale:
            write_lock(folder, dead_holder())
        start = time.time() + 0.02
        for one in competitors if n % 2 else reversed(competitors):  # the first may have the only free core
            send(one, f"{folder} {start}")
        answers = [read_line(one) for one in competitors]
        assert answers.count("mine") == 1, answers
        winner = answers.index("mine")
        winners.add(winner)
        holder, loser = competitors[winner].pid, answers[1 - winner]
        assert loser.startswith(f"{int(Exit.IN_USE)} {folder} is in use by pid {holder} on ")
        assert not stale or (folder / "events").read_text() == "lock_taken_over\n"
        for one in competitors:
            send(one, "go on")
            assert read_line(one) == "done"
        assert [path.name for path in folder.iterdir()] == (["events"] if stale else [])
    assert winners == {0, 1}, "the two jobs did not compete"


HOLDERS = {
    "a process of the same number": (replace(Holder.current(), id="old", born="1"), 0, "", True),
    "a live process": (replace(Holder.current(), id="old", pid=1, born=process_stat(1).born), 700, "", False),
    "refreshed 500 s ago elsewhere": (ELSEWHERE, 500, "", False),
    "not for 700 s": (ELSEWHERE, 700, "", True),
    "this job, started anew": (ELSEWHERE, 0, "77.1", True),
    "another node of this job": (ELSEWHERE, 0, "77.0", False),
    "another job": (ELSEWHERE, 0, "78.1", False),
    "no job": (replace(ELSEWHERE, job=""), 0, "", False),
}


@pytest.mark.parametrize(("holder", "age_s", "job", "taken"), HOLDERS.values(), ids=HOLDERS)
def test_stale_locks_are_taken_over_and_live_locks_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events, holder: Holder, age_s: float, job: str, taken: bool
) -> None:
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job.partition(".")[0])
        monkeypatch.setenv("SLURM_RESTART_COUNT", job.partition(".")[2])
    assert module._STALE_S == 600
    monkeypatch.setattr(module, "_STALE_S", 600 * SLOW)
    path = write_lock(tmp_path, holder, SLOW * age_s)
    lock = RunLock(tmp_path, COMM, events)
    if taken:
        lock.acquire()
        assert events[0]["of"] == asdict(holder)
        assert -1 <= events[0]["silent_s"] - SLOW * age_s < 5 * SLOW
        lock.release()
        assert not path.exists()
        return
    with pytest.raises(Locked) as error:
        lock.acquire()
    assert error.value.exit_code == 3
    assert f"pid {holder.pid} on {holder.host}" in str(error.value)
    assert ("SLURM job 77" in str(error.value)) == bool(holder.job)
    lock.release()
    assert json.loads(path.read_text()) == asdict(holder)


def test_an_unreadable_lock_is_stale_by_its_age(tmp_path: Path, events: Events) -> None:
    group = json.dumps(asdict(replace(ELSEWHERE, pid=-1)))  # of processes
    for content in ("", '{"id": "o', '{"pid": 12}', group):
        path = write_lock(tmp_path, ELSEWHERE)
        path.write_text(content)
        with pytest.raises(Locked, match=f"an unknown job.*delete {re.escape(str(path))}"):
            RunLock(tmp_path, COMM, events).acquire()
        os.utime(path, (0, 0))
        with RunLock(tmp_path, COMM, events):
            assert events.pop()["of"] is None, content


def test_a_holder_refreshes_its_lock_and_detects_a_takeover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEARTBEAT_S", 0.02)
    path = tmp_path / "run.lock"
    with RunLock(tmp_path, COMM, no_event) as lock:
        os.utime(path, (0, 0))
        wait_until(lambda: path.stat().st_mtime > time.time() - 60)
        lock.check()
        write_lock(tmp_path, ELSEWHERE)
        wait_until(lambda: lock._lost)
        with pytest.raises(Locked, match="was taken over by another job"):
            lock.check()
    assert path.is_file(), "another job's lock must not be removed"
    assert json.loads(path.read_text())["id"] == "old"
