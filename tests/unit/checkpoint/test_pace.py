"""Pace of writing: sleeps in proportion to work, until someone waits or its time is over."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.savers import load_tensors, make_writer, tensors
from helpers.waiting import wait_until

from clipx.checkpoint.copies import HostCopies
from clipx.checkpoint.pace import Pace


class Sleeps(list[float]):
    """Stands in for the event that ends the pace, and records how long it is waited for."""

    def wait(self, seconds: float) -> None:
        self.append(seconds)


def sleeps(share: float, seconds: float) -> list[float]:
    pace = Pace(share, seconds)
    found = pace._hurried = Sleeps()  # type: ignore[assignment]
    for worked in (1.0, 2.0):
        pace.pause(worked)
    return found


def test_pauses_are_proportional_to_the_work_and_end_with_the_time() -> None:
    assert sleeps(0.1, 1e9) == pytest.approx([9.0, 18.0])
    assert sleeps(1.0, 1e9) == [0.0, 0.0]
    assert sleeps(0.1, 0.0) == [0.0, 0.0]
    assert sleeps(0.1, 5.0)[0] <= 5.0


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Makes the pace of all writers too slow to end. Returns the work after which they paused."""
    paused: list[float] = []
    pause = Pace.pause

    def recorded(pace: Pace, worked: float) -> None:
        paused.append(worked)
        pause(pace, 1e9)

    monkeypatch.setattr(HostCopies, "writer_share", 1e-9)
    monkeypatch.setattr(Pace, "pause", recorded)
    return paused


@pytest.mark.parametrize("end", ["wait", "save", "close"])
def test_whoever_waits_for_a_save_ends_its_pace(end: str, slow: list[float], tmp_path: Path) -> None:
    run = make_writer(tmp_path)
    run._last -= 1e9  # a long interval of checkpoints: the pace does not end by itself
    run.save(1, tensors(1), {})
    wait_until(lambda: len(slow) == 1)  # it pauses after the header
    assert not (tmp_path / "step-00000001").exists()
    if end == "wait":
        run.wait()
    elif end == "save":
        run.save(2, tensors(2), {})
    run.close()
    assert load_tensors(tmp_path, 1)["a/n"] == 1


def test_frequent_saves_pause_for_at_most_half_of_their_interval(slow: list[float], tmp_path: Path) -> None:
    run = make_writer(tmp_path)
    run.save(1, tensors(1), {})
    assert run._pending is not None
    run._pending.result()  # without waiting through `wait`: ends by itself
    assert len(slow) > 1
    run.close()
