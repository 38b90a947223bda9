"""A process killed at any moment of a save leaves only complete checkpoints and no partial one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from helpers.cases import slow_except
from helpers.savers import load_tensors, make_writer, tensors

from clipx.checkpoint.format import CheckpointDir, find_damage
from clipx.checkpoint.tensors import RankRows

CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir")  # all calls that change a file system
fork = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yields a folder in memory if there is one.

    The result of a kill does not depend on the disk, only the speed does.
    """
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
    """Runs `call` in a child process that exits before the given call of the operating system. Returns True if it did.

    The disk is then in the state after the previous call, so that every moment is covered.
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
    process.join(600)
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


@pytest.mark.parametrize("step", slow_except([2, 1], 1), ids=["a new step", "the same step again"])
def test_a_kill_before_any_system_call_of_a_save_leaves_a_complete_checkpoint(folder: Path, step: int) -> None:
    """keep_last=1: a lost checkpoint would be the only one."""
    values, killed = [], True
    while killed:
        path = folder / str(len(values))
        save(path, 1, 1.0)
        killed = killed_before(len(values), lambda path=path: save(path, step, 2.0))  # type: ignore[misc]
        make_writer(path).close()  # as a resumed run does
        assert not list(path.glob("tmp.*"))
        assert not list(filter(None, map(find_damage, CheckpointDir(path, print).folders())))
        found = load_tensors(path)
        values.append(found["value"].item())
        assert found["rows"].eq(values[-1]).all(), "files are from different checkpoints"
        assert found["a/n"] == (step if values[-1] == 2 else 1)
    assert len(values) > 20 and values == sorted(values), (
        "the new checkpoint did not stay valid after its first appearance"
    )
    assert (values[0], values[-1]) == (1.0, 2.0)


def test_files_are_synced_before_the_checkpoint_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut needs this order, and killing a process does not test it."""
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
