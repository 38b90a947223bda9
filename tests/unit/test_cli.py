"""Start-up of the commands."""

from __future__ import annotations

import sys

from helpers.runs import run

STARTS = """
import gc
from clipx.cli import imports
with imports():
    assert not gc.isenabled()
    import json
assert gc.isenabled() and gc.get_freeze_count() > 0
frozen = gc.get_freeze_count()
import sys
sys.modules["torch"] = json  # loaded before: a notebook, or a second command in one process
with imports():
    assert gc.isenabled()
assert gc.get_freeze_count() == frozen
"""


def test_libraries_are_imported_without_garbage_collection_once() -> None:
    run(sys.executable, "-c", STARTS, fresh=True)
