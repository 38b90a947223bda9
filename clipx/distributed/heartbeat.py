"""Heartbeats of all ranks in the process group's store, which attribute a failed collective to a rank.

The error of a failed collective names at most an address. torch's monitored_barrier reports on rank 0 only, and only
while the other ranks still call it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TypeVar

from clipx.distributed.comm import Comm
from clipx.distributed.consistency import format_names
from clipx.distributed.launch_env import node_name, read_launch_env
from clipx.errors import ClipxError, NotSynced, PeerLost, Stopped

T = TypeVar("T")

_PERIOD_S = 1.0  # between two heartbeats of a rank: one small write to the store, which serves 10,000s per second
_LOST_AFTER_S = 4.0  # without a heartbeat after a failed collective, a rank counts as lost
_GRACE_S = 20.0  # after the failure of a rank, for the others to end by an error of their collective
_FAILED = "clipx/heartbeat/failed"
_SILENT_S = 40.0  # without a heartbeat while this rank makes no step, another counts as lost: no collective may fail
_LOOK_S = 5.0  # between two reads of all heartbeats while this rank makes no step
_READ_S = 8.0  # for the other ranks to read the reason of a failure: less than _TIMEOUT_S
_TIMEOUT_S = 10.0  # for the store to answer; also for the whole search if no rank is lost

# torch's error types (DistBackendError and similar), or the text of gloo's errors, which are plain RuntimeErrors.
_COLLECTIVE_ERROR = re.compile(r"^Dist\w*Error |gloo|NCCL")


@dataclass(slots=True)
class _Heartbeat:
    """Record of a rank in the store."""

    rank: int
    host: str
    pid: int
    step: int = 0
    count: int = 0
    state: str = "alive"  # alive; exited (finished, or stopped by another rank's failure); or the error that ended it

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@contextlib.contextmanager
def name_lost_peers(comm: Comm, step: Callable[[], int], end: Callable[[str], object]) -> Iterator[None]:
    """Converts the error of a collective to a PeerLost that names the rank that failed, is lost, or is late.

    Collective: all ranks enter it together. `step` returns the current step. Detecting a lost rank takes about 5 s.
    NCCL's collectives wait for a lost rank until distributed.timeout_s: a thread calls `end` with the reason, which
    must end this process, 20 s after another rank ended with an error, or within 60 s after one was killed, which then
    sends no heartbeat while this one makes no step.
    """
    if comm.world == 1:
        yield
        return
    heartbeats = _HeartbeatThread(comm, step, end)
    try:
        with heartbeats:
            yield
    except RuntimeError as error:
        if not _is_collective_error(error):
            raise
        cause = heartbeats.failure or call_with_timeout(heartbeats.find_cause, _TIMEOUT_S + _LOST_AFTER_S)
        raise PeerLost(cause or _describe_lost_store(step())) from error


class _HeartbeatThread:
    """Thread that writes this rank's heartbeats to the store. The last heartbeat holds the reason for the end."""

    failure: str | None = None  # of another rank, as it reported it

    def __init__(self, comm: Comm, step: Callable[[], int], end: Callable[[str], object]) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        self._comm, self._step, self._end = comm, step, end
        self._beat = _Heartbeat(comm.rank, node_name(), os.getpid())
        self._store = _get_default_store().clone()  # a store client is not thread-safe
        self._reader = _get_default_store().clone()
        self._stop, self._failed = threading.Event(), False
        self._called = self._looked = time.monotonic()
        self._last_step = -1
        self._seen: dict[tuple[int, int], float] = {}  # when a heartbeat, by rank and number, was seen first
        self._thread = threading.Thread(target=self._write, name="heartbeat", daemon=True)

    def __enter__(self) -> _HeartbeatThread:
        self._put()
        self._comm.barrier()  # from here on, every rank finds a heartbeat of every other rank
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or _is_collective_error(error):
            self._beat.state = "exited"
        else:
            reason = str(error) if isinstance(error, ClipxError) else f"{type(error).__name__}: {error}"
            self._beat.state = " ".join(reason.split())[:500]
        self._failed = self._beat.state != "exited" and not isinstance(error, Stopped | NotSynced)  # these on all ranks
        self._stop.set()
        self._thread.join(_TIMEOUT_S)

    def _write(self) -> None:
        try:
            while not self._stop.wait(_PERIOD_S):
                self._put()
                self._follow_failed_rank()
                self._follow_silent_rank()
            self._put()
            if self._failed:
                self._store.set(_FAILED, _describe_failed([self._beat]))
                if self._comm.is_main:  # it may serve the store
                    self._wait_until_read()
        except RuntimeError:  # the process that serves the store has ended, maybe regularly before this one
            if not self._stop.wait(_GRACE_S):
                self._end(_describe_lost_store(self._step()))

    def _follow_failed_rank(self) -> None:
        """Ends this process if another rank failed and the main thread does not notice it, as in a NCCL collective."""
        if not self._store.check([_FAILED]):
            return
        self.failure = self._store.get(_FAILED).decode()
        self._store.set(f"{_FAILED}/{self._comm.rank}", "read")
        if not self._stop.wait(_GRACE_S):
            self._end(self.failure)

    def _follow_silent_rank(self) -> None:
        """Ends this process if another rank sends no heartbeat, and this one makes no step."""
        now = time.monotonic()
        suspended, self._called = now - self._called > _LOOK_S, now  # this process was, and maybe the others with it
        if suspended or self._beat.step != self._last_step:
            self._last_step, self._seen = self._beat.step, {}
        elif now - self._looked > _LOOK_S:
            self._looked, beats = now, self._read()
            self._seen = {(beat.rank, beat.count): self._seen.get((beat.rank, beat.count), now) for beat in beats}
            since = {rank: first for (rank, _), first in self._seen.items()}
            silent = [beat for beat in beats if beat.state == "alive" and now - since[beat.rank] > _SILENT_S]
            # Rank 0 may serve the store, in which the other ranks find the same in this time.
            if silent and not self._stop.wait(2 * _LOOK_S if self._comm.is_main else 0):
                self.failure = _describe_silent(silent, now - since[silent[0].rank])
                self._end(self.failure)

    def _wait_until_read(self) -> None:
        """Waits until the ranks that are alive have read why this rank failed; for a killed one, 8 s."""
        end = time.monotonic() + _READ_S
        while time.monotonic() < end:
            others = [beat.rank for beat in self._read() if beat.state == "alive" and beat.rank != self._comm.rank]
            if self._store.check([f"{_FAILED}/{rank}" for rank in others]):
                return
            time.sleep(_PERIOD_S / 4)

    def _put(self) -> None:
        self._beat.step, self._beat.count = self._step(), self._beat.count + 1
        self._store.set(f"clipx/heartbeat/{self._beat.rank}", json.dumps(asdict(self._beat)))

    def _read(self) -> list[_Heartbeat]:
        texts = self._reader.multi_get([f"clipx/heartbeat/{rank}" for rank in range(self._comm.world)])
        return [_Heartbeat(**json.loads(text)) for text in texts]

    def find_cause(self) -> str:
        """Polls the heartbeats until the rank that caused the failure is known. Returns the error message."""
        step = self._step()
        first, start = self._read(), time.monotonic()
        while (waited := time.monotonic() - start) < _TIMEOUT_S:
            now = self._read()
            if failed := [beat for beat in now if beat.state not in ("alive", "exited")]:
                return _describe_failed(failed)
            lost = [b for a, b in zip(first, now, strict=True) if b.state == "alive" and a.count == b.count]
            if lost and waited > _LOST_AFTER_S:
                return _describe_silent(lost, waited)
            time.sleep(_PERIOD_S)  # a thousand ranks may each be reading a thousand heartbeats
        if missing := [beat for beat in now if beat.state == "alive"]:  # the others exited with the same error
            return (
                f"{_format(missing)} is alive, but did not join a collective of step {step} within "
                "distributed.timeout_s: find what it waits for, or raise distributed.timeout_s"
            )
        return (
            f"a collective failed at step {step} though all ranks are alive: check the network between them, or raise "
            "distributed.timeout_s"
        )


def _is_collective_error(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and bool(_COLLECTIVE_ERROR.search(f"{type(error).__name__} {error}"))


def _describe_failed(heartbeats: list[_Heartbeat]) -> str:
    return f"{_format(heartbeats)} ended at step {heartbeats[0].step}: {heartbeats[0].state}"


def _describe_silent(heartbeats: list[_Heartbeat], seconds: float) -> str:
    return (
        f"{_format(heartbeats)} sent no heartbeat for {seconds:.0f} s, since step {heartbeats[0].step}: it was killed "
        "or suspended, usually for lack of memory; check its output, and continue with resume=auto"
    )


def _format(heartbeats: list[_Heartbeat]) -> str:
    return format_names([str(beat) for beat in heartbeats])


def _describe_lost_store(step: int) -> str:
    where = read_launch_env().host or "its host"
    return (
        f"rank 0, or its launcher on {where}, was lost at step {step}: its TCPStore does not answer; check its output"
    )


def call_with_timeout(call: Callable[[], T], seconds: float) -> T | None:
    """Runs `call` in a thread.

    Returns its result, or None after `seconds` or a RuntimeError, such as of a lost store.
    """
    results: list[T] = []

    def work() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
