"""Trains a run that receives a signal at one place of its end: signalled_at_end.py SIGNAL PLACE OVERRIDE…"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from clipx import train
from clipx.distributed.comm import Comm
from clipx.logger.jsonl import Jsonl
from clipx.report import run_report
from clipx.run.lock import RunLock

PLACES: dict[str, tuple[Any, str]] = {
    "report": (run_report, "write_report"),
    "loggers": (Jsonl, "close"),
    "lock": (RunLock, "release"),
    "group": (Comm, "close"),
}


def signalled(call: Callable[..., object], number: int) -> Callable[..., object]:
    """Returns the call with a signal to this process before it."""

    def wrapped(*args: object) -> object:
        os.kill(os.getpid(), number)
        return call(*args)

    return wrapped


name, place, *sys.argv[1:] = sys.argv[1:]
owner, attribute = PLACES[place]
setattr(owner, attribute, signalled(getattr(owner, attribute), signal.Signals[name]))
train.main()
