"""Processes and ports of this machine."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from pathlib import Path

from clipx.processes import process_stat

_KEPT = 20
_reserved: deque[contextlib.ExitStack] = deque()


def children_of(pid: int) -> list[int]:
    """Returns the pids of a process's children; none if it has ended."""
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants_of(pid: int) -> list[int]:
    """Returns the pids of a process's children and of theirs."""
    children = children_of(pid)
    return [*children, *(one for child in children for one in descendants_of(child))]


def is_running(pid: int) -> bool:
    """Returns whether a process runs. A zombie does not."""
    return process_stat(pid).state not in ("", "Z")


def free_ports(number: int) -> int:
    """Returns the first of `number` consecutive free ports, which no other call on this machine returns.

    A UNIX socket without a file, named after the port, reserves it. A process holds those of its last calls.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 20
    first = 20_000 + 600 * worker  # the workers of a session take ports of different ranges
    for port in range(first + os.getpid() % 300, first + 600, number):
        with contextlib.ExitStack() as names, contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for p in range(port, port + number):
                names.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0clipx-tests-port-{p}")
                stack.enter_context(socket.socket()).bind(("", p))
            _reserved.append(names.pop_all())
            if len(_reserved) > _KEPT:
                _reserved.popleft().close()
            return port
    raise OSError("no free ports")
