"""The comparison of the present tree with a commit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import golden
import pytest


@pytest.mark.slow
def test_a_changed_tree_is_found(tmp_path: Path) -> None:
    """A clone with another default seed, and its own commit as BASE. The row of the job script, which gives its seeds,
    is equal."""
    clone = tmp_path / "a clone"
    subprocess.run(["git", "clone", "--quiet", str(golden.ROOT), str(clone)], check=True)
    for name in ("golden.py", "helpers/runs.py"):  # they may differ from those of the commit
        shutil.copy(golden.ROOT / "tests" / name, clone / "tests" / name)
    config = clone / "conf/train.yaml"
    text = config.read_text()
    assert "\nseed: 0\n" in text
    config.write_text(text.replace("\nseed: 0\n", "\nseed: 1\n"))
    command = [sys.executable, str(clone / "tests/golden.py"), "HEAD", "--row", "slurm", "--row", "stages"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "equal (0 tensors" in done.stdout
    assert "1 of 2 rows are as expected" in done.stdout
    worktrees = subprocess.run(
        ["git", "-C", str(clone), "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert len(worktrees.stdout.splitlines()) == 1
