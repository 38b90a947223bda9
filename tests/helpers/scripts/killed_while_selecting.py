"""Opens the training data of a run, killed by SIGKILL before a change of the selection's files: NUMBER OVERRIDES...

A change is the opening of a file for writing, or a rename. Prints the number of changes.
"""

from __future__ import annotations

import os
import signal
import sys

from helpers.runs import compose

left, changes = int(sys.argv[1]), 0


def count(event: str, details: tuple[object, ...]) -> None:
    global changes
    written = event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR)
    if (written or event == "os.rename") and str(details[0]).startswith(f"{os.environ['CLIPX_CACHE']}/selection"):
        if changes == left:
            os.kill(os.getpid(), signal.SIGKILL)
        changes += 1


spec = compose(*sys.argv[2:])
sys.addaudithook(count)
spec.data.open()
print(changes)
