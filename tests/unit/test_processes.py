"""Processes of clipx under each start method: they end with their parent, and their death is reported with its cause."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from helpers import CODE
from helpers.forks import start_server
from helpers.processes import descendants_of, is_running
from helpers.samples import Called
from helpers.waiting import wait_until
from torch.utils.data import DataLoader

from clipx import processes
from clipx.data import loader_pool
from clipx.data.loader_pool import load, receive, start_loading
from clipx.data.shards.write import run_in_pool
from clipx.errors import DataError
from clipx.processes import how_ended, oom_kills, why_ended

METHODS = ("fork", "forkserver", "spawn")


@pytest.fixture
def method(request: pytest.FixtureRequest) -> Iterator[str]:
    """Starts the processes of the test by this method of multiprocessing."""
    start_server()
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)


# --------------------------------------------------------------------------------------------------------------- causes


@pytest.mark.parametrize(
    ("method", "end", "argument", "expected"),
    [
        ("fork", os._exit, 7, r"code 7\): a library ended it: see its output above"),
        ("fork", signal.raise_signal, signal.SIGSEGV, r"by SIGSEGV\): a library crashed in it: PYTHONFAULTHANDLER=1"),
        ("fork", signal.raise_signal, 40, r"by signal 40\): a signal from outside ended it"),
        (
            "forkserver",
            signal.raise_signal,
            signal.SIGKILL,
            r"by SIGKILL\): it was killed from outside, for the kernel",
        ),
    ],
    indirect=["method"],
)
def test_a_dead_process_is_named_with_its_exit_code_or_signal(
    method: str, end: object, argument: int, expected: str, processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipx.processes.oom_kills", lambda: 0)
    with pytest.raises(DataError, match=rf"^a loader process of this rank died \(pid \d+, {expected}"):
        list(load(None, Called(end), [argument] * 3, workers=1, ready=1))
    with pytest.raises(DataError, match=rf"^counting: a process died \(pid \d+, {expected}.*; run the command again"):
        run_in_pool(end, [argument] * 3, "counting", processes=2)  # type: ignore[arg-type]


def test_memory_is_blamed_only_for_a_sigkill_that_the_kernel_has_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [2, 2]
    monkeypatch.setattr(processes, "oom_kills", lambda: counts.pop())
    monkeypatch.setattr(processes, "first_oom_kills", lambda: 1)
    assert why_ended(-signal.SIGKILL, "lower x").endswith("for lack of memory: lower x, or give the job more memory")
    monkeypatch.setattr(processes, "first_oom_kills", lambda: 2)
    assert "lower x" not in why_ended(-signal.SIGKILL, "lower x")
    assert "memory" not in why_ended(-signal.SIGTERM, "lower x") + why_ended(1, "lower x")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.events": "oom 5\noom_kill 3\n"}, 3),
        ({"proc/self/cgroup": "4:memory:/a\n0::/\n", "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 4\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "proc/vmstat": "nr_free_pages 1\noom_kill 5\n"}, 5),
        ({}, None),
    ],
)
def test_kills_for_lack_of_memory_are_counted(files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(str(tmp_path)) == expected


def test_signals_without_a_name_have_a_number() -> None:
    assert [how_ended(code) for code in (0, 3, -9, -34, -40)] == [
        *("code 0", "code 3", "by SIGKILL", "by SIGRTMIN", "by signal 40"),
    ]


# -------------------------------------------------------------------------------------------------------- start and end


@pytest.mark.parametrize("method", ["forkserver"], indirect=True)
def test_data_that_cannot_be_sent_to_a_process_is_one_line(method: str) -> None:
    with pytest.raises(DataError, match=r"cannot be sent to loader processes \(cannot pickle '_thread.lock' object\)"):
        list(load(None, Called(threading.Lock()), [1], workers=1, ready=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["forkserver"], indirect=True)
def test_processes_have_the_environment_of_the_one_that_starts_them(
    method: str, processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that of a fork server: it names the cache, the plug-ins and the credentials."""
    monkeypatch.setenv("CLIPX_PROCESSES", "1")
    assert list(load(None, Called(os.getenv), ["CLIPX_PROCESSES"], workers=1, ready=1)) == ["1"]
    run_in_pool(subprocess.check_call, [["sh", "-c", "test $CLIPX_PROCESSES = 1"]], "testing")


def test_an_item_that_cannot_be_sent_is_an_error_and_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a queue prints such an error and drops the item, for which the trainer would wait."""
    text = "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"

    def fail(item: object) -> bytes:
        if isinstance(item, int):
            raise RuntimeError(text)
        return dumps(item)

    dumps = ForkingPickler.dumps
    monkeypatch.setattr(ForkingPickler, "dumps", fail)
    with pytest.raises(DataError, match=r"^in a loader process: processes need more shared memory than /dev/shm has"):
        list(load(None, Called(abs), [1], workers=1, ready=1))


def test_one_handler_raises_a_death_while_an_item_is_awaited_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    iter(DataLoader([0], num_workers=1))  # torch's handler, which remains
    monkeypatch.setattr(loader_pool, "_deaths", loader_pool._Deaths())  # loaders of other tests may be left
    before, others = signal.getsignal(signal.SIGCHLD), set(multiprocessing.active_children())
    items = start_loading(time.sleep, [0, 3600], workers=1, ready=1)
    handler = signal.getsignal(signal.SIGCHLD)
    receive(items)
    (worker,) = set(multiprocessing.active_children()) - others
    try:
        worker.kill()
        wait_until(lambda: not worker.is_alive())
    except DataError as error:
        pytest.fail(f"raised by another statement: {error}")
    with pytest.raises(DataError, match="died"):
        receive(items)
    longer = start_loading(abs, [1], workers=1, ready=1)
    del items
    gc.collect()
    assert signal.getsignal(signal.SIGCHLD) is handler is not before, "a loader is left"
    assert receive(longer) == 1
    del longer
    assert signal.getsignal(signal.SIGCHLD) is before


@pytest.mark.parametrize("method", METHODS)
def test_no_process_of_a_pool_remains_after_a_killed_parent(method: str) -> None:
    program = (
        "import multiprocessing, time; from clipx.data.shards.write import run_in_pool; "
        f"multiprocessing.set_start_method('{method}'); run_in_pool(time.sleep, [3600] * 2, 'sleeping', processes=2)"
    )
    with subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": CODE}) as parent:
        try:
            wait_until(lambda: len(_sleeping(parent.pid)) >= 2)
            found = descendants_of(parent.pid)
        finally:
            parent.kill()
    wait_until(lambda: not any(map(is_running, found)))


def _sleeping(pid: int) -> list[int]:
    """Returns the descendants of a process that have a thread which waits for its end."""
    return [one for one in descendants_of(pid) if len(list(Path(f"/proc/{one}/task").glob("*"))) > 1]


@pytest.mark.parametrize("method", METHODS)
def test_processes_start_with_sigterm_blocked(method: str) -> None:
    """A fork server, too: a thread that an import of a loader process starts would receive the SIGTERM of SLURM."""
    program = (
        "import multiprocessing, signal, sys; from clipx.processes import blocked_sigterm\n"
        f"multiprocessing.set_start_method('{method}')\n"
        "with blocked_sigterm():\n"
        "    process = multiprocessing.Process(target=signal.raise_signal, args=(signal.SIGTERM,))\n"
        "    process.start()\n"
        "process.join()\n"
        "blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "sys.exit(f'{process.exitcode} {blocked}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": CODE}, capture_output=True, text=True
    )
    assert done.stderr == "0 False\n"
