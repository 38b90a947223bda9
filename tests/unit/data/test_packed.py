"""Packed values: equal to the original list, compact, and shared copy-free with forked readers."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import run

from clipx.data.shards.packed import Packed

VALUES: list[Any] = [
    "a",
    "",
    "ü 猫 \U0001f600",
    "half a pair \ud83d",
    ["one", "two", '"quoted"'],
    [],
    7,
    -1,
    None,
    "a\nb",
]


def test_packed_values_equal_the_original_list() -> None:
    packed = Packed.of(VALUES)
    assert list(packed) == VALUES
    assert [packed[i] for i in range(-len(VALUES), 0)] == VALUES
    assert list(pickle.loads(pickle.dumps(packed))) == VALUES
    assert len(Packed.of([])) == 0
    for place in (len(VALUES), -len(VALUES) - 1):
        with pytest.raises(IndexError):
            packed[place]


SHARED = """
import os
from pathlib import Path
from clipx.data.shards.packed import Packed

def private_dirty_bytes():  # pages written since the fork
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))

packed = Packed.of(f"a photograph of thing number {i} in some place" for i in range(400_000))
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
else:
    before = private_dirty_bytes()
    total = sum(map(len, packed))
    print(total, private_dirty_bytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")
def test_reading_all_values_in_a_forked_process_copies_no_pages() -> None:
    """A plain list of the same strings would be copied completely, 40 MiB.

    In a process of its own: a page that a thread of the parent writes to becomes private in the child, too.
    """
    total, grown = map(int, run(sys.executable, "-c", SHARED).stdout.split())
    assert total > 400_000 * 40
    assert grown < 4 << 20
