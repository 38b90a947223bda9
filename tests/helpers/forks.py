"""Processes forked from a server that has imported torch, timm and clipx, which takes 5 s.

Each is an ordinary process with separate memory, environment, output and exit code; only the import is skipped.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from clipx.config.typed import last_of_each
from helpers import CODE, file_faults

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["helpers.preload"])
_PATIENCE = 120  # seconds in which ranks must exit by themselves after one has failed


@functools.cache
def start_server() -> None:
    """Starts the fork server with the folders of this checkout on its path: Python 3.11 to 3.13 do not pass sys.path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", CODE)
        if (library := file_faults.library()) is not None:
            patch.setenv("LD_PRELOAD", str(library))
        forkserver.ensure_running()


def fork_measuring_processes(patch: pytest.MonkeyPatch) -> None:
    """Makes `clipx.bench` start its processes as forks, in 0.1 s instead of 3 to 5 s each.

    The server starts with the first of them: commands that end with an error need none.
    """

    def forking_context(method: str) -> BaseContext:
        start_server()
        return CONTEXT

    for module in ("processes", "shards", "gpu_parts.process"):
        patch.setattr(f"clipx.bench.{module}.get_context", forking_context)


class Fork:
    """Runs `python WORDS…` in the environment `env`, with the methods of `subprocess.Popen`.

    Output goes to two files.
    """

    def __init__(self, words: Sequence[str], env: Mapping[str, str], out: Path, err: Path) -> None:
        self.words, self.out, self.err = last_of_each(words), out, err
        start_server()
        self._process = CONTEXT.Process(target=_become, args=(self.words, dict(env), os.getcwd(), out, err))  # noqa: PTH109
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self, seconds: float = 0) -> int | None:
        """Returns the exit code, or None if the process still runs after `seconds`."""
        self._process.join(seconds)
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(list(self.words), timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns stdout and stderr of an ended process. Raises TimeoutExpired."""
        self.wait(timeout)
        return self.out.read_text(), self.err.read_text()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def run(
    places: Sequence[Mapping[str, str]], words: Sequence[str], env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Starts a process for each place, which adds to the environment. Like torchrun, it ends the others when one fails.

    Returns the first exit code that is not 0, and the output of the processes in the order of the places. Raises
    TimeoutExpired.
    """
    with TemporaryDirectory() as name:
        files = [(Path(name) / f"{i}.out", Path(name) / f"{i}.err") for i in range(len(places))]
        forks = [Fork(words, {**env, **place}, *pair) for place, pair in zip(places, files, strict=True)]
        try:
            code = _first_failure(forks, words, time.monotonic() + timeout)
        finally:
            for fork in forks:
                fork.kill()
        out, err = ("".join(path.read_text() for path in paths if path.exists()) for paths in zip(*files, strict=True))
    return subprocess.CompletedProcess(words, code, out, err)


def _first_failure(forks: Sequence[Fork], words: Sequence[str], deadline: float) -> int:
    start, code = time.monotonic(), 0
    running = list(forks)
    while running:
        for fork in list(running):
            found = fork.poll(0.02)
            if found is not None:
                running.remove(fork)
                if found and not code:
                    code, deadline = found, min(deadline, time.monotonic() + _PATIENCE)
        if running and time.monotonic() > deadline:
            if code:
                return code
            raise subprocess.TimeoutExpired(list(words), time.monotonic() - start)
    return code


def settle(out: Path, err: Path) -> None:
    """Sends the output of this fork to files, and resets the start method of its children to the default."""
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    multiprocessing.set_start_method(None, force=True)


def move(env: Mapping[str, str], folder: str) -> None:
    """Continues with another environment, in another folder."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)


def _become(words: list[str], env: dict[str, str], folder: str, out: Path, err: Path) -> None:
    settle(out, err)
    move(env, folder)
    if file_faults.VARIABLE in env:
        file_faults.arm(env[file_faults.VARIABLE])
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    if words[:2] == ["-m", "clipx.bench"]:
        fork_measuring_processes(pytest.MonkeyPatch())
    code = _code_of(words)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _code_of(words: list[str]) -> int:
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, "")
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()
    return 0
