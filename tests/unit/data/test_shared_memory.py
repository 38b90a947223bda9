"""Shared memory of loader processes: rows arrive, and memory that is in use is not written to again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import get_context

from clipx.data import shared_memory
from clipx.data.shared_memory import copy_to_shared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has leases")


@pytest.fixture(autouse=True)
def own_files() -> Iterator[list[int]]:
    """Starts without files, and closes those of the test."""
    shared_memory._kept.cache_clear()
    yield (kept := shared_memory._kept(os.getpid()))
    for file in kept:
        os.close(file)
    shared_memory._kept.cache_clear()


def rows(value: int, count: int = 5) -> Tensor:
    return torch.full((count, 64, 3), value, dtype=torch.uint8)


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_rows_are_copied(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "get_sharing_strategy", lambda: strategy)
    for source in (torch.arange(60, dtype=torch.uint8).view(5, 4, 3), torch.randn(7, 3)):
        shared = copy_to_shared(source)
        assert shared.is_shared() and (shared == source).all() and shared.dtype == source.dtype
        source.zero_()
        assert shared.any(), "the copy is independent of its reused source"


def test_memory_is_used_again_only_when_no_tensor_refers_to_it(own_files: list[int]) -> None:
    first = copy_to_shared(rows(1))
    view = first.permute(1, 2, 0)[3:]
    second = copy_to_shared(rows(2))
    assert len(own_files) == 2
    del first
    third = copy_to_shared(rows(3))
    assert len(own_files) == 3, "the view still refers to the first"
    assert view.eq(1).all() and second.eq(2).all() and third.eq(3).all()
    del view, second
    kept = [copy_to_shared(rows(value, count)) for value, count in ((4, 4), (5, 6))]
    assert len(own_files) == 3, "fewer rows and more rows than before"
    assert third.eq(3).all() and kept[0].eq(4).all() and kept[1].eq(5).all()
    assert [len(x) for x in kept] == [4, 6]


def _hold(connection: Connection) -> None:
    held: Tensor = connection.recv()
    connection.send("mapped")
    connection.recv()
    connection.send(held.unique().tolist())


def test_memory_is_not_used_again_while_another_process_has_it_or_will_receive_it(own_files: list[int]) -> None:
    context = get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_hold, args=(there,))
    process.start()
    sent = copy_to_shared(rows(1))
    here.send(sent)
    del sent
    others = [copy_to_shared(rows(2))]  # on its way, or received
    assert here.recv() == "mapped"
    others.append(copy_to_shared(rows(3)))
    assert len(own_files) == 3
    here.send("end")
    assert here.recv() == [1]
    process.join(600)
    others.append(copy_to_shared(rows(4)))
    assert len(own_files) == 3, "the process has ended"
    assert [x.unique().tolist() for x in others] == [[2], [3], [4]]


def test_a_forked_process_does_not_use_the_files_of_its_parent(own_files: list[int]) -> None:
    copy_to_shared(rows(1))  # unused at once
    assert len(own_files) == 1 and shared_memory._is_unused(own_files[0])
    process = get_context("fork").Process(target=_write_in_child, args=(own_files[0],))
    process.start()
    process.join(600)
    assert process.exitcode == 0
    assert os.pread(own_files[0], 1, 0) == b"\1"


def _write_in_child(parent: int) -> None:
    shared = copy_to_shared(rows(9))
    assert shared.eq(9).all() and parent not in shared_memory._kept(os.getpid())
