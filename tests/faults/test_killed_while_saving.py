"""A process that ends at any moment of a save leaves whole checkpoints and nothing that looks like one."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from helpers.savers import load_tensors, make_writer, steps, tensors

from clipx.checkpoint.format import RankRows

CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir")  # all that change a file system
fork = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: what a kill leaves does not depend on the disk, whose speed does not matter."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def state(step: int, value: float) -> dict[str, torch.Tensor | RankRows]:
    return {**tensors(step), "value": torch.tensor(value), "rows": RankRows(torch.full((3, 2), value), 0)}


def save(path: Path, step: int, value: float) -> None:
    run = make_writer(path, keep_last=1)
    run.save(step, state(step, value), {})
    run.wait()
    run.close()


def killed_before(number: int, call: Callable[[], None]) -> bool:
    """Calls in a process of its own, which ends before the given call of the operating system. Whether it came to that.

    The disk is then as it is after the call before: each moment is met.
    """

    def child() -> None:
        count = iter(range(1 << 30))

        def wrapped(original: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **options: object) -> object:
                if next(count) == number:
                    os._exit(9)
                return original(*args, **options)

            return call

        for name in CALLS:
            setattr(os, name, wrapped(getattr(os, name)))
        call()
        os._exit(0)

    process = fork.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "the same step again"])
def test_at_each_call_that_a_save_makes(folder: Path, step: int) -> None:
    """With keep_last=1, where one that is lost is the only one."""
    values, killed = [], True
    while killed:
        path = folder / str(len(values))
        save(path, 1, 1.0)
        killed = killed_before(len(values), lambda path=path: save(path, step, 2.0))  # type: ignore[misc]
        make_writer(path).close()  # as a run that is resumed
        assert not list(path.glob("tmp.*"))
        for each in steps(path):
            load_tensors(path, each)
        found = load_tensors(path)
        values.append(found["value"].item())
        assert found["rows"].eq(values[-1]).all(), "all files are of one checkpoint"
        assert found["a/n"] == (step if values[-1] == 2 else 1)
    assert len(values) > 20 and values == sorted(values), "the new one from one moment on"
    assert (values[0], values[-1]) == (1.0, 2.0)


def test_all_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a power cut wants it, which no killed process shows."""
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(fd: int) -> None:
        done.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")  # noqa: PTH115, PTH119
        fsync(fd)

    def recorded_rename(source: str, target: str) -> None:
        done.append(f"name {os.path.basename(target)}")  # noqa: PTH119
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    save(tmp_path / "run", 1, 1.0)
    files = ["shard.00001-of-00001.safetensors", "tensors.safetensors", "state.json", "MANIFEST.json"]
    assert done[:4] == [f"sync {file}" for file in files]
    assert done[4].startswith("sync tmp.step-00000001.") and done[5:] == ["name step-00000001", "sync run"]


def test_at_any_time(folder: Path) -> None:
    """kill -9, thirty times, and until some hit the middle of a save, of a process that saves one after the other."""

    def child(first: int, pipe: Connection) -> None:
        run = make_writer(folder / "run", keep_last=2, hooks={"on_commit": lambda _: pipe.send(None)})
        for step in range(first, first + 100_000):
            run.save(step, state(step, step) | {"large": torch.full((300_000,), float(step))}, {})

    random.seed(0)
    newest, stumps, kills = 0, 0, 0
    while kills < 30 or (stumps <= 5 and kills < 300):  # how many hit a save depends on the machine's load
        kills += 1
        mine, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=child, args=(newest + 1, theirs))
        process.start()
        mine.recv()  # it has saved one
        time.sleep(random.uniform(0, 0.03))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        stumps += len(list((folder / "run").glob("tmp.*")))
        found = load_tensors(folder / "run")
        assert found["a/n"] > newest and found["large"].eq(found["a/n"]).all()
        newest = int(found["a/n"])
    assert stumps > 5, "some were killed in the middle"
