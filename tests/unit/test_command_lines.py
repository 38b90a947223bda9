"""Random command lines of all commands: accepted, or refused by one line before anything is written.

All of them, by hand: `tests/command_lines.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.runs import run


@pytest.mark.slow
@pytest.mark.parametrize("sort", ["right", "wrong"])
def test_drawn_command_lines_end_with_one_line_or_begin_their_work(sort: str, tmp_path: Path) -> None:
    drawn = ("--every", {"right": "40", "wrong": "43"}[sort], "--from", "5", "-n", "1", "--processes", "2")
    script = str(ROOT / "tests" / "command_lines.py")
    done = run(sys.executable, script, sort, *drawn, fresh=True, check=False)  # forks without torch
    assert done.returncode == 0, done.stdout + done.stderr
