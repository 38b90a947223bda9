"""Heartbeats of all ranks in the store of the rendezvous, which attribute a failed collective to a rank."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TypeVar

from torch.distributed import PrefixStore, Store

from clipx.abort import ENDING, abort
from clipx.compat import default_store
from clipx.distributed.consistency import format_names
from clipx.distributed.launch_env import node_name, read_launch_env
from clipx.errors import ClipxError, NotSynced, PeerLost, Stopped
from clipx.escape import escaped

T = TypeVar("T")
log = logging.getLogger(__name__)

_PERIOD_S = 1.0  # between two heartbeats of a rank: one small write to the store, which serves 10,000s per second
_LOST_AFTER_S = 4.0  # without a heartbeat after a failed collective, a rank counts as lost
_GRACE_S = 20.0  # after the failure of a rank, for the others to end by an error of their own
_SILENT_S = 40.0  # without a heartbeat while this rank makes no step, another counts as lost: no collective may fail
_SILENT_AT_START_S = 120.0  # the same before the first step, where a long call may hold the interpreter's lock
_LOOK_S = 5.0  # between two reads of all heartbeats while this rank makes no step
_READ_S = 8.0  # for the other ranks to read the reason of a failure: less than _TIMEOUT_S
_TIMEOUT_S = 10.0  # for the store to answer; also for the whole search if no rank is lost

_FAILED = "failed"  # key of the reason why the ranks end: that of the rank which wrote it first
_groups = itertools.count()  # a process may train several runs in one process group

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
    state: str = "alive"  # alive; searching (a collective failed); exited (finished, or by another); or its own error

    @property
    def runs(self) -> bool:
        return self.state in ("alive", "searching")

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


class Heartbeats:
    """Heartbeats of this rank, and a watch over the other ranks, from the rendezvous until `stop`.

    A rank that is lost ends this process with PeerLost's exit code and one line that names it: about 5 s after its
    collective failed; else, as NCCL's collectives wait for it, by a thread, 20 s after it ended with an error, or
    within 60 s (before the first step 3 min) after it was killed or suspended, while this rank makes no step. Nothing
    is unwound, since that may wait for the lost rank.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        """Writes the first heartbeat of this rank."""
        self._beat, self._world = _Heartbeat(rank, node_name(), os.getpid()), world
        store = PrefixStore("clipx/heartbeat", store)
        self._store, self._reader = store.clone(), store.clone()  # an operation blocks the others of its client
        self._step: Callable[[], int] = lambda: 0
        self._end: Callable[[str], object] = lambda reason: abort(reason, PeerLost.exit_code, rank=rank)
        self._stop, self._failed = threading.Event(), False
        self._cause: str | None = None  # that another rank has published
        self._lost: set[int] = set()
        self._rounds = 0
        self._called = self._looked = time.monotonic()
        self._last_step = -1
        self._seen: dict[tuple[int, int], float] = {}  # when a heartbeat, by rank and number, was seen first
        self._thread = threading.Thread(target=self._write, name="heartbeat", daemon=True)
        self._put()

    @classmethod
    def start_in_group(cls, rank: int, world: int) -> Heartbeats:
        """Starts heartbeats in a process group that exists already."""
        heartbeats = cls(PrefixStore(f"{next(_groups)}", default_store()), rank, world)
        heartbeats.start()
        return heartbeats

    def start(self) -> None:
        """Starts the threads. From here on, each other rank is to have a heartbeat in the store."""
        self._thread.start()
        threading.Thread(target=self._watch_store, name="heartbeat store", daemon=True).start()

    def follow(self, step: Callable[[], int], end: Callable[[str], object]) -> None:
        """Sets `step`, which returns the current step, and `end`, which ends this process with a reason."""
        self._step, self._end = step, end

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Context that ends this process by an error of a collective, and tells the other ranks of any other error."""
        try:
            yield
        except BaseException as error:
            if is_collective_error(error):
                self._end_for(error)
            self._beat.state = "exited" if isinstance(error, PeerLost) else _reason(error)
            self._failed = not isinstance(error, Stopped | NotSynced | PeerLost)  # these are raised on all ranks
            raise

    def end_if_lost(self) -> None:
        """Ends this process if another rank has failed or is lost. Takes up to 10 s if none is."""
        cause = call_with_timeout(self._find_lost, _TIMEOUT_S + _LOST_AFTER_S) or self._cause
        if cause:
            self._lose(cause)

    def stop(self) -> None:
        """Writes the last heartbeat, which holds the reason for the end. A second call does nothing."""
        if self._beat.state == "alive":
            self._beat.state = "exited"
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------------- the threads

    def _write(self) -> None:
        try:
            while not self._stop.wait(_PERIOD_S):
                self._put()
                if self._failed:
                    self._publish(self._store, _describe_failed([self._beat]))
                elif (cause := self._published(self._store)) and not self._stop.wait(_GRACE_S):
                    self._lose(cause)  # another rank failed, unnoticed by the main thread, as in a NCCL collective
                self._follow_silent_rank()
                self._rounds += 1
            self._put()
            if self._failed:
                self._publish(self._store, _describe_failed([self._beat]))
                self._wait_until_read(self._store)
        except RuntimeError:  # the process that serves the store has ended, maybe regularly before this one
            if not self._stop.wait(_GRACE_S):
                self._end_alone()

    def _watch_store(self) -> None:
        """Ends this process if the store does not answer. Counts looks: this process may have been suspended."""
        looks, seen = 0, -1
        while not self._stop.wait(_LOOK_S):
            looks, seen = (looks + 1 if self._rounds == seen else 0), self._rounds
            if looks * _LOOK_S > _SILENT_S and not ENDING.is_set():  # else the other thread ends it within a time limit
                self._end_alone()

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
            limit = _SILENT_S if self._beat.step else _SILENT_AT_START_S
            silent = [beat for beat in beats if beat.runs and now - since[beat.rank] > limit]
            if silent:
                self._lose(self._describe_silent(silent, now - since[silent[0].rank]))

    # ------------------------------------------------------------------------------------------ the end by another

    def _end_for(self, error: BaseException) -> None:
        """Ends this process for the error of a collective, with its cause."""
        ENDING.set()  # torchrun sends SIGTERM to the other ranks of one that was killed
        log.debug("a collective failed", exc_info=error)
        self._beat.state = "searching"
        cause = call_with_timeout(self._find_cause, _TIMEOUT_S + _LOST_AFTER_S) or self._cause
        if cause:
            self._lose(cause)
        self._end_alone()

    def _lose(self, cause: str) -> None:
        """Ends this process after the other ranks could read why: all of them report the cause that was found first."""
        ENDING.set()
        if self._failed:  # by its own error, which is closing
            self._end_alone()
        self._beat.state = "exited"
        self._end(call_with_timeout(lambda: self._agree(cause), _TIMEOUT_S) or self._cause or cause)

    def _end_alone(self) -> None:
        """Ends this process without the store."""
        if self._failed:
            self._end(self._beat.state)
        where = read_launch_env().host or "its host"
        self._end(
            f"rank 0, or its launcher on {where}, was lost at step {self._step()}: its TCPStore does not answer; check "
            "its output"
        )

    def _agree(self, cause: str) -> str:
        """Publishes that this rank ends, and the cause. Returns the cause that was published first."""
        self._reader.set(str(self._beat.rank), json.dumps(asdict(self._beat)))
        cause = self._publish(self._reader, cause)
        self._wait_until_read(self._reader)
        return cause

    def _publish(self, store: Store, cause: str) -> str:
        """Writes why the ranks end, unless another rank has. Returns what is written."""
        found: str = store.compare_set(_FAILED, "", cause).decode()
        self._mark_read(store)
        return found

    def _published(self, store: Store) -> str | None:
        """Returns why the ranks end, if one of them has published it."""
        if not store.check([_FAILED]):
            return None
        self._mark_read(store)
        self._cause = store.get(_FAILED).decode()
        return self._cause

    def _mark_read(self, store: Store) -> None:
        store.set(f"{_FAILED}/{self._beat.rank}", "read")

    def _wait_until_read(self, store: Store) -> None:
        """Waits on rank 0, which may serve the store, until the living ranks have read the cause, at most 8 s."""
        end = time.monotonic() + _READ_S
        while self._beat.rank == 0 and time.monotonic() < end:
            others = [beat.rank for beat in self._read() if beat.runs and beat.rank not in {0, *self._lost}]
            if store.check([f"{_FAILED}/{rank}" for rank in others]):
                return
            time.sleep(_PERIOD_S / 4)

    # ------------------------------------------------------------------------------------------------ the records

    def _put(self) -> None:
        self._beat.step, self._beat.count = self._step(), self._beat.count + 1
        self._store.set(str(self._beat.rank), json.dumps(asdict(self._beat)))

    def _read(self) -> list[_Heartbeat]:
        """Returns the last heartbeat of each rank that has sent one."""
        keys = [str(rank) for rank in range(self._world)]
        if not self._reader.check(keys):  # a group that exists already: another rank may not have begun
            keys = [key for key in keys if self._reader.check([key])]
        return [_Heartbeat(**json.loads(text)) for text in self._reader.multi_get(keys)]

    def _find_lost(self) -> str | None:
        """Polls the heartbeats until the rank that caused a failure is known. Returns None if there is none."""
        first, start = {beat.rank: beat.count for beat in self._read()}, time.monotonic()
        while (waited := time.monotonic() - start) < _TIMEOUT_S:
            if cause := self._published(self._reader):
                return cause
            now = self._read()
            if failed := [beat for beat in now if not beat.runs and beat.state != "exited"]:
                return _describe_failed(failed)
            lost = [beat for beat in now if beat.runs and beat.count == first.get(beat.rank)]
            if lost and waited > _LOST_AFTER_S:
                return self._describe_silent(lost, waited)
            time.sleep(_PERIOD_S)  # a thousand ranks may each be reading a thousand heartbeats
        return None

    def _find_cause(self) -> str:
        """Returns the error message for a failed collective."""
        step = self._step()
        if cause := self._find_lost():
            return cause
        missing = [beat for beat in self._read() if beat.state == "alive"]
        if missing:  # the same error ends the others
            return (
                f"{_format(missing)} is alive, but did not join a collective of step {step} within "
                "distributed.timeout_s: find what it waits for, or raise distributed.timeout_s"
            )
        return (
            f"a collective failed at step {step} though all ranks are alive: check the network between them, or raise "
            "distributed.timeout_s"
        )

    def _describe_silent(self, heartbeats: list[_Heartbeat], seconds: float) -> str:
        self._lost |= {beat.rank for beat in heartbeats}
        return (
            f"{_format(heartbeats)} sent no heartbeat for {seconds:.0f} s, since step {heartbeats[0].step}: it was "
            "killed or suspended, usually for lack of memory; check its output, and continue with resume=auto"
        )


def is_collective_error(error: BaseException) -> bool:
    """Returns whether torch raised an error because another rank did not take part in a collective."""
    return isinstance(error, RuntimeError) and bool(_COLLECTIVE_ERROR.search(f"{type(error).__name__} {error}"))


def _reason(error: BaseException) -> str:
    """Returns the error of this rank as a line for the others."""
    reason = str(error) if isinstance(error, ClipxError) else f"{type(error).__name__}: {error}"
    return escaped(" ".join(reason.split())[:500])


def _describe_failed(heartbeats: list[_Heartbeat]) -> str:
    return f"{_format(heartbeats)} ended at step {heartbeats[0].step}: {heartbeats[0].state}"


def _format(heartbeats: list[_Heartbeat]) -> str:
    return format_names([str(beat) for beat in heartbeats])


def call_with_timeout(call: Callable[[], T], seconds: float) -> T | None:
    """Runs `call` in a thread. Returns its result, or None after `seconds` or a RuntimeError, as of a lost store."""
    results: list[T] = []

    def work() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
