"""Shared memory of loader processes: memory that is in use is not written to again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import get_context

from clipx.data.loader_process import start_process, this_process
from clipx.data.shared_memory import copy_to_shared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has leases")


@pytest.fixture(autouse=True)
def own_files() -> Iterator[list[int]]:
    """Starts without files, and closes those of the test."""
    start_process()
    yield (kept := this_process().shared_files)
    for file in kept:
        os.close(file)
    start_process()


def rows(value: int, count: int = 5) -> Tensor:
    return torch.full((count, 64, 3), value, dtype=torch.uint8)


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
