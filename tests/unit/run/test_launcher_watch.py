"""A process that was started by hand does not end with its shell. Ranks of a launcher: faults/test_stopping.py."""

from __future__ import annotations

import pytest

from clipx.run.watchdog import LAUNCHER_PID, find_launcher


@pytest.mark.parametrize("variables", [{}, {LAUNCHER_PID: "1234567"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_a_process_started_by_hand_has_no_launcher(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in (LAUNCHER_PID, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_launcher() is None
