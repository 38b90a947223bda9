"""Ranks that count as killed although no collective fails. The clock is the test's; the store is real."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import FileStore

from clipx.distributed import heartbeat
from clipx.distributed.heartbeat import Heartbeats, _Heartbeat
from clipx.errors import DataError

HOST = "n0"


class Watch:
    """Rank 1 of 3, whose thread is called once a second. Ranks 0 and 2 are entries of the store."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.step = 1000.0, 7
        self.beats = {rank: _Heartbeat(rank, HOST, 100 + rank, step=7) for rank in (0, 2)}
        self.silent: set[int] = set()
        self.ends: list[tuple[float, str]] = []
        self.store = FileStore(str(folder / "store"), 1)
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now))  # other threads have theirs
        self.heartbeats = Heartbeats(self.store, 1, 3)
        self.heartbeats.follow(lambda: self.step, lambda reason: self.ends.append((self.now, reason)))

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            if self.ends:
                return
            self.now += 1
            for rank, beat in self.beats.items():
                beat.count += rank not in self.silent
                self.store.set(f"clipx/heartbeat/{rank}", json.dumps(asdict(beat)))
            self.heartbeats._put()
            self.heartbeats._follow_silent_rank()


@pytest.fixture(autouse=True)
def _goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps from later tests that this process would have ended."""
    monkeypatch.setattr(heartbeat, "ENDING", threading.Event())


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(tmp_path, monkeypatch)


def test_a_rank_that_has_finished_is_not_lost(watch: Watch) -> None:
    watch.beats[0].state, watch.silent = "exited", {0}
    watch.run(200)
    assert not watch.ends


def test_a_job_that_was_suspended_continues(watch: Watch) -> None:
    """SLURM suspends all ranks, at any time between two looks, and this one may be the first to run again."""
    for seconds in range(100, 110):
        watch.run(seconds)
        watch.now += 3600
        watch.silent = {0, 2}
        watch.run(3)
        watch.silent = set()
    watch.run(100)
    assert not watch.ends


def test_before_the_first_step_a_rank_may_be_silent_longer(watch: Watch) -> None:
    """A call that holds the interpreter's lock stops the heartbeats of a healthy rank, too."""
    watch.step, watch.silent = 0, {2}
    watch.run(100)
    assert not watch.ends
    watch.run(60)
    assert "rank 2 " in watch.ends[0][1]


def test_all_ranks_report_the_cause_that_was_found_first(watch: Watch) -> None:
    watch.heartbeats._lose("rank 2 is gone")
    other = Heartbeats(watch.store, 2, 3)
    other.follow(lambda: 7, lambda reason: watch.ends.append((0, reason)))
    other._lose("a collective failed")
    assert [reason for _, reason in watch.ends] == ["rank 2 is gone"] * 2


def test_a_rank_that_fails_by_itself_reports_its_own_error_though_another_one_is_lost(watch: Watch) -> None:
    with pytest.raises(DataError), watch.heartbeats.naming():
        raise DataError("a\x1b[31m shard is gone")
    watch.silent = {2}
    watch.run(60)
    assert watch.ends[0][1] == r"a\x1b[31m shard is gone"


def test_a_rank_without_heartbeats_is_named_while_this_one_makes_no_step(watch: Watch) -> None:
    watch.run(200)
    assert not watch.ends, "ranks that wait for each other are alive"
    killed, watch.silent = watch.now, {2}
    watch.run(60)
    ((ended, reason),) = watch.ends
    assert reason.startswith("rank 2 (host n0, pid 102) sent no heartbeat for ")
    assert heartbeat._SILENT_S < ended - killed < 60
