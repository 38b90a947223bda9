"""Counts the requests that read from remote storage, and the bytes that they return, in this process."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StorageTraffic:
    """Number of requests, and of bytes received."""

    requests: int = 0
    bytes: int = 0

    def plus(self, other: StorageTraffic) -> StorageTraffic:
        return StorageTraffic(self.requests + other.requests, self.bytes + other.bytes)


NO_TRAFFIC = StorageTraffic()


class _Counter:
    """Counter that the threads of a process share."""

    def __init__(self) -> None:
        self.lock, self.traffic = threading.Lock(), StorageTraffic()

    def add(self, traffic: StorageTraffic) -> None:
        with self.lock:
            self.traffic = self.traffic.plus(traffic)

    def take(self) -> StorageTraffic:
        with self.lock:
            taken, self.traffic = self.traffic, StorageTraffic()
        return taken


_counter = _Counter()


def count_read(requests: int, received: int = 0) -> None:
    """Counts requests and the bytes that they returned."""
    _counter.add(StorageTraffic(requests, received))


def take_traffic() -> StorageTraffic:
    """Returns the traffic since the last call."""
    return _counter.take()
