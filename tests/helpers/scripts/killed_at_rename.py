"""Runs `clipx.embed`, `clipx.score` or `clipx.select`, killed by SIGKILL before a rename.

Arguments: embed|score|select NUMBER OVERRIDES...
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from helpers.runs import compose

from clipx.extra.curate.score import score
from clipx.extra.curate.select import select
from clipx.extra.embed.command import embed

command, left = sys.argv[1], int(sys.argv[2])
replace = Path.replace


def counted(self: Path, target: str | Path) -> Path:
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)


Path.replace = counted  # type: ignore[method-assign]
{"embed": embed, "score": score, "select": select}[command](compose(*sys.argv[3:], config_name=command))
