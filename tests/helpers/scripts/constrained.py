"""Runs a module as a program: METHOD LIMIT MODULE WORDS... METHOD starts the processes of multiprocessing.

LIMIT is a soft limit of `resource`, such as NOFILE=64; AS=+N leaves N bytes of address space; none.
"""

from __future__ import annotations

import multiprocessing
import resource
import runpy
import sys
from pathlib import Path


def set_limit(limit: str) -> None:
    name, _, value = limit.partition("=")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if value[0] == "+" else 0
    number = getattr(resource, f"RLIMIT_{name}")
    resource.setrlimit(number, (used + int(value), resource.getrlimit(number)[1]))


if __name__ == "__main__":  # spawned processes import this file
    multiprocessing.set_start_method(sys.argv[1])
    if sys.argv[2] != "none":
        set_limit(sys.argv[2])
    del sys.argv[:3]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
