"""Fixture of the tests of remote shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.s3_server import FaultyProxy, clear_caches


@pytest.fixture
def proxy(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyProxy]:
    """The faulty proxy with a separate CLIPX_CACHE for each test."""
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    clear_caches()
    yield proxy
    clear_caches()
