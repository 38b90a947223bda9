"""Savers for the tests of checkpoints, and child processes that may be killed or limited safely."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clipx.checkpoint.async_writer import AsyncWriter
from clipx.checkpoint.format import CheckpointDir
from clipx.checkpoint.spec import CheckpointSpec
from clipx.checkpoint.staging import HostCopies, Pairs
from clipx.distributed.comm import Comm
from helpers.forks import CONTEXT, start_server

write = os.write


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Blocks all writes of background threads until it is set."""
    gate = threading.Event()

    def held(fd: int, data: memoryview) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(600)
        return write(fd, data)

    monkeypatch.setattr(os, "write", held)
    return gate


SINGLE_RANK = Comm(0, 1, 0, torch.device("cpu"))


class EventLog(list[tuple[str, dict[str, Any]]]):
    """Collects the events of a saver."""

    def __call__(self, kind: str, **facts: Any) -> None:
        self.append((kind, facts))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [facts for one, facts in self if one == kind]


class LateCopies(HostCopies):
    """Copies tensors that change with updates as late as possible, when updates are held. Stands in for a device."""

    def __init__(self) -> None:
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made = threading.Event()
        self._made.set()

    @property
    def waiting(self) -> int:
        """Number of tensors that are not copied yet."""
        return len(self._late)

    def copy(self, now: Pairs, until_update: Pairs) -> None:
        super().copy(now, [])
        self._late += until_update
        if self._late:
            self._made.clear()

    def hold_updates(self) -> None:
        super().copy(self._late, [])
        self._late = []
        self._made.set()

    def synchronize(self) -> None:
        assert self._made.wait(600)


def make_writer(
    path: Path, log: EventLog | None = None, comm: Comm = SINGLE_RANK, hooks: Any = None, **options: Any
) -> AsyncWriter:
    return AsyncWriter(path, CheckpointSpec(**options), comm, EventLog() if log is None else log, **(hooks or {}))


def tensors(step: int, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"a/x": torch.full((size,), float(step)), "a/n": torch.tensor(step)}


def steps(path: Path) -> list[int]:
    return [int(p.name.removeprefix("step-")) for p in CheckpointDir(path, print).folders()]


def load_tensors(path: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Loads a checkpoint; fails if any of its files is damaged."""

    def tell(message: str) -> None:
        raise AssertionError(message)

    found = CheckpointDir(path, tell).load(step)
    assert found is not None
    return dict(found.tensors)


def run_in_processes(ranks: int, folder: Path, call: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the results of `call(comm, *args)`, functions of modules, in `ranks` processes.

    An exception is returned, and the exit code of a process that died. The processes are forks of a server: autograd
    fails in forks of a process that has used it after fake tensors, as other tests do.
    """
    start_server()
    processes, results = [], []
    for rank in range(ranks):
        mine, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_process, args=(theirs, rank, ranks, folder, call, args))
        process.start()
        theirs.close()
        processes.append((process, mine))
    for process, mine in processes:
        try:
            results.append(mine.recv())
        except EOFError:
            process.join()
            results.append(process.exitcode)
        process.join(600)
        assert not process.is_alive()
    (folder / "rendezvous").unlink(missing_ok=True)
    return results


def _process(
    pipe: Connection, rank: int, world: int, folder: Path, call: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        if world > 1:
            store = (folder / "rendezvous").as_uri()
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        result = call(Comm(rank, world, rank, torch.device("cpu")), *args)
    except Exception as error:
        result = error
    pipe.send(result)
