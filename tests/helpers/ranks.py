"""Ranks that stay: processes of one group, which call one function after the other, without a new start."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from helpers import forks
from helpers.processes import free_ports
from helpers.runs import rank_environment

_PATIENCE = 60  # seconds for the other ranks after one has failed: they may wait for it


class Ranks:
    """Calls functions on `world` ranks at once. Their output goes to files in `folder`."""

    def __init__(self, world: int, folder: Path) -> None:
        self.world, self.folder = world, folder
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._port = 0

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns the results of all ranks. Fails with the traceback and the output of a rank that fails.

        The ranks end then, and the next call starts new ones.
        """
        if not self._processes:
            self._start()
        printed = {path: path.stat().st_size for path in self._outputs()}
        for rank, connection in enumerate(self._connections):
            # The environment and the folder of the test that calls, not of the first one.
            connection.send((function, args, rank_environment(rank, self.world, self._port), os.getcwd()))  # noqa: PTH109
        results: dict[int, tuple[str, Any]] = {}
        while len(results) < self.world:
            failed = any(kind == "error" for kind, _ in results.values())
            waiting = [c for i, c in enumerate(self._connections) if i not in results]
            ready = wait(waiting, _PATIENCE if failed else None)
            if not ready:
                break
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                results[rank] = self._received(rank)
        errors = [f"rank {rank}: {text}" for rank, (kind, text) in sorted(results.items()) if kind == "error"]
        if errors:
            output = [path.read_text()[printed.get(path, 0) :] for path in self._outputs()]  # of this call
            self.close()
            pytest.fail("\n".join([*errors, *output]))
        return [results[rank][1] for rank in range(self.world)]

    def _outputs(self) -> list[Path]:
        return sorted(self.folder.glob("rank*.txt"))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []
        for path in self._outputs():
            path.unlink()

    def _start(self) -> None:
        forks.start_server()
        self._port = free_ports(1)
        for rank in range(self.world):
            ours, theirs = forks.CONTEXT.Pipe()
            process = forks.CONTEXT.Process(target=_serve, args=(theirs, self.folder / f"rank{rank}.txt"))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _received(self, rank: int) -> tuple[str, Any]:
        try:
            found: tuple[str, Any] = self._connections[rank].recv()
        except EOFError:
            self._processes[rank].join()
            return "error", f"ended with exit code {self._processes[rank].exitcode}"
        return found


def _serve(connection: Connection, output: Path) -> None:
    forks.settle(output, output)
    while True:
        try:
            function, args, env, folder = connection.recv()
        except EOFError:
            os._exit(0)
        forks.move(env, folder)
        try:
            answer = "done", function(*args)
        except BaseException:
            answer = "error", traceback.format_exc()
        sys.stdout.flush()
        connection.send(answer)
