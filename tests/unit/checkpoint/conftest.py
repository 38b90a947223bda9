"""Fixtures of the tests of uploads: a run directory, and URLs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipx.checkpoint.uploader._BACKOFF_S", (0.05, 0.2))
    monkeypatch.setattr("clipx.checkpoint.uploader._FINAL_PAUSE_S", 0.2)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "events.jsonl"):
        (path / name).write_text(f"of {name}\n")
    return path


@pytest.fixture
def local_url(tmp_path: Path) -> str:
    """Returns a URL whose files a test can read locally."""
    return f"file://{tmp_path}/far"
