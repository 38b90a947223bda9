"""Runs `python -m WORDS…` with standard streams that cannot be written: `streams.py 1=closed 2=full … -- WORDS…`.

closed     descriptor closed before the start, as by `>&-`
full       on a full disk
pipe       a pipe without a reader
terminal   a terminal that was hung up
"""

from __future__ import annotations

import os
import runpy
import sys


def broken(kind: str) -> int:
    """Returns a descriptor that cannot be written."""
    if kind == "full":
        return os.open("/dev/full", os.O_WRONLY)
    reader, writer = os.pipe() if kind == "pipe" else os.openpty()
    os.close(reader)
    return writer


end = sys.argv.index("--")
for word in sys.argv[1:end]:
    name, _, kind = word.partition("=")
    number = int(name)
    if kind == "closed":
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)  # as Python starts
    else:
        descriptor = broken(kind)
        os.dup2(descriptor, number)
        os.close(descriptor)
sys.argv = sys.argv[end + 1 :]
sys.path.insert(0, "")
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
