"""Measuring processes of the benchmarks as forks."""

from __future__ import annotations

import pytest
from helpers.forks import fork_measuring_processes


@pytest.fixture(autouse=True)
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_measuring_processes(monkeypatch)
