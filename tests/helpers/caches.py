"""Fixtures of tests that index or write shards, or read data that is cached on this machine. A conftest imports them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import ClassVar

import pytest

from helpers.s3_server import clear_caches


@pytest.fixture
def processes() -> None:
    """Lets a test index and write shards in processes."""


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes and writes shards in threads, which start faster than processes."""
    if "processes" not in request.fixturenames:
        monkeypatch.setattr("clipx.data.shards.write.ProcessPoolExecutor", _Threads)


class _Threads(ThreadPoolExecutor):
    _processes: ClassVar[dict[int, BaseProcess]] = {}

    def __init__(self, number: int, *_: object) -> None:
        super().__init__(number)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets a separate CLIPX_CACHE, and makes this process forget what it knows of files."""
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    clear_caches()
    yield
    clear_caches()
