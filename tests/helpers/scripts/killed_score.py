"""Runs `python -m clipx.score` and kills it by SIGKILL before a rename: killed_score.py NUMBER OVERRIDES..."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from helpers.runs import compose

from clipx.score.__main__ import score

left = int(sys.argv[1])
replace = Path.replace


def counted(self: Path, target: str | Path) -> Path:
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)


Path.replace = counted  # type: ignore[method-assign]
score(compose(*sys.argv[2:], config_name="score"))
