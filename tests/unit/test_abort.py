"""The end of a process by `abort`, which any thread may call."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = r"""
import threading
from clipx.abort import abort, add_reporter

def slow(reason, code):
    thread.start()  # another thread ends the process, too
    thread.join(0.5)

def failing(reason, code):
    raise KeyError

thread = threading.Thread(target=abort, args=("another", 2), daemon=True)
add_reporter(lambda reason, code: print(reason, code))
abort("lost\n\x1b[31m", 7, failing, slow, rank=3)
"""


def test_the_first_reason_ends_the_process_in_one_line_after_all_reporters() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=600)
    assert done.stderr == r"error (rank 3): lost\n\x1b[31m" + "\n"
    assert (done.returncode, done.stdout) == (7, "lost\n\x1b[31m 7\n")
