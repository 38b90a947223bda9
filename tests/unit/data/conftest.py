"""Fixture of the tests of data that is cached on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.s3_server import clear_caches


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets a separate CLIPX_CACHE, and makes this process forget what it knows of files."""
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    clear_caches()
    yield
    clear_caches()
