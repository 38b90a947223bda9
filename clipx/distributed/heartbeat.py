"""Which rank is gone? A collective that fails names an address at best; here every rank leaves signs of life."""

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
from clipx.distributed.launch_env import find_place, node_name
from clipx.errors import ClipxError, PeerLost

T = TypeVar("T")

_PERIOD_S = 1.0  # between two signs of life of a rank: one small write to the store, which serves 10,000s a second
_GONE_S = 4.0  # without one, after a collective has failed
_PATIENCE_S = 10.0  # for the store; and in all, where no rank is gone

# torch's own kinds (DistBackendError and the like), or what gloo's say, which are RuntimeErrors like any other.
_OF_A_COLLECTIVE = re.compile(r"^Dist\w*Error |gloo|NCCL")


@dataclass(slots=True)
class _Sign:
    """What a rank says of itself, in the store of the process group."""

    rank: int
    host: str
    pid: int
    step: int = 0
    count: int = 0
    state: str = "alive"  # alive, left (done, or stopped by another's end), or the error that ended it

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@contextlib.contextmanager
def peers_told(comm: Comm, step: Callable[[], int]) -> Iterator[None]:
    """Turns the error of a collective into a PeerLost that names the rank that failed, is gone, or stays behind.

    To be entered by all ranks together. It takes some 5 s to be sure that a rank is gone. NCCL reports most deaths
    by ending the process itself, after distributed.timeout_s; then only its own words are there.
    """
    if comm.world == 1:
        yield
        return
    signs = _Signs(comm, step)
    try:
        with signs:
            yield
    except RuntimeError as error:
        if not _of_a_collective(error):
            raise
        raise PeerLost(within(signs.blame, _PATIENCE_S + _GONE_S) or _store_gone(step())) from error


class _Signs:
    """A thread that writes this rank's signs of life. On the way out it leaves why it ends."""

    def __init__(self, comm: Comm, step: Callable[[], int]) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        self._comm, self._step = comm, step
        self._own = _Sign(comm.rank, node_name(), os.getpid())
        self._store = _get_default_store().clone()  # a client serves one thread at a time
        self._reader = _get_default_store().clone()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, name="signs of life", daemon=True)

    def __enter__(self) -> _Signs:
        self._put()
        self._comm.barrier()  # so that every rank finds a sign of every other
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or _of_a_collective(error):
            self._own.state = "left"
        else:
            words = str(error) if isinstance(error, ClipxError) else f"{type(error).__name__}: {error}"
            self._own.state = " ".join(words.split())[:500]
        self._over.set()
        self._thread.join(_PATIENCE_S)

    def _write(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store's owner may be the first to end
            while not self._over.wait(_PERIOD_S):
                self._put()
            self._put()

    def _put(self) -> None:
        self._own.step, self._own.count = self._step(), self._own.count + 1
        self._store.set(f"clipx/sign/{self._own.rank}", json.dumps(asdict(self._own)))

    def _read(self) -> list[_Sign]:
        found = self._reader.multi_get([f"clipx/sign/{rank}" for rank in range(self._comm.world)])
        return [_Sign(**json.loads(text)) for text in found]

    def blame(self) -> str:
        """Watches the others until it is clear who is the cause, and says it."""
        step = self._step()
        first, start = self._read(), time.monotonic()
        while (waited := time.monotonic() - start) < _PATIENCE_S:
            now = self._read()
            if failed := [sign for sign in now if sign.state not in ("alive", "left")]:
                return f"{_names(failed)} ended at step {failed[0].step}: {failed[0].state}"
            gone = [b for a, b in zip(first, now, strict=True) if b.state == "alive" and a.count == b.count]
            if gone and waited > _GONE_S:
                return (
                    f"{_names(gone)} gave no sign of life for {waited:.0f} s, since step {gone[0].step}: ended or "
                    "stopped from outside, for memory as a rule; its own output may say more, and resume=auto goes on"
                )
            time.sleep(_PERIOD_S)  # a thousand ranks may be reading a thousand signs
        if missing := [sign for sign in now if sign.state == "alive"]:  # the others met the same error, and left
            return (
                f"{_names(missing)} lives, but did not come to a collective of step {step} within "
                "distributed.timeout_s: see what it waits for, or wait longer"
            )
        return (
            f"a collective failed at step {step} though all ranks are alive: check the network between them, or raise "
            "distributed.timeout_s"
        )


def _of_a_collective(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and bool(_OF_A_COLLECTIVE.search(f"{type(error).__name__} {error}"))


def _names(signs: list[_Sign]) -> str:
    shown = ", ".join(map(str, signs[:4]))
    return shown if len(signs) <= 4 else f"{shown} and {len(signs) - 4} more"


def _store_gone(step: int) -> str:
    where = find_place().host or "its host"
    return f"rank 0, or its launcher on {where}, is gone at step {step}: the ranks' common store does not answer"


def within(call: Callable[[], T], seconds: float) -> T | None:
    """What `call` returns; None where it fails as a store does that is gone, or takes longer."""
    found: list[T] = []

    def work() -> None:
        with contextlib.suppress(RuntimeError):
            found.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
