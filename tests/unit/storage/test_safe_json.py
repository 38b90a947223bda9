"""Small files that another program may have written."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from clipx.storage.safe_json import read_regular


def test_reading_a_small_file_allocates_its_size_and_not_the_limit(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_bytes(content := b"{" * 200)
    tracemalloc.start()
    try:
        assert read_regular(tmp_path / "run.lock") == content
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_folder_in_place_of_a_file_leaves_no_open_file(tmp_path: Path) -> None:
    open_files = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        with pytest.raises(IsADirectoryError):
            read_regular(tmp_path)
    assert len([*Path("/proc/self/fd").iterdir()]) == open_files
