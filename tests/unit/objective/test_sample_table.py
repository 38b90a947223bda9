"""The table of per-sample state: row ownership, reads and writes, resharding through checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from clipx.checkpoint.format import Checkpoint
from clipx.checkpoint.staging import HostCopies, StagingBuffer
from clipx.checkpoint.tensors import CheckpointTensors, RankRows
from clipx.distributed.comm import Comm
from clipx.objective.losses.sample_state import SampleTable, repeated_later

CPU, META = torch.device("cpu"), torch.device("meta")


def rank(k: int, world: int, device: torch.device = CPU) -> Comm:
    return Comm(k, world, k, device)


@pytest.mark.parametrize(("samples", "world"), [(10, 1), (10, 3), (10, 4), (3, 8), (16, 4), (400_000_000, 8)])
def test_every_row_has_exactly_one_owner(samples: int, world: int) -> None:
    tables = [SampleTable(rank(k, world), samples, 2, device=META) for k in range(world)]
    assert tables[0].start == 0
    assert tables[-1].stop == samples
    assert all(a.stop == b.start for a, b in itertools.pairwise(tables))
    assert sum(len(t.rows) for t in tables) == samples


def test_written_rows_are_read_back_and_others_are_nan() -> None:
    table = SampleTable(rank(0, 1), 9, 2)
    table.write(torch.tensor([7, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    read = table.read(torch.tensor([2, 3, 7]))
    assert read[[0, 2]].tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert read[1].isnan().all()


def test_the_last_write_of_a_repeated_sample_wins() -> None:
    index = torch.tensor([4, 1, 4, 4, 1])
    table = SampleTable(rank(0, 1), 5, 1)
    table.write(index, torch.arange(5.0)[:, None])
    assert table.rows[[4, 1], 0].tolist() == [3.0, 4.0]
    assert repeated_later(index).tolist() == [True, True, True, False, False]


def test_a_rank_writes_only_its_rows() -> None:
    tables = [SampleTable(rank(k, 3), 8, 1) for k in range(3)]
    for table in tables:
        table.write(torch.arange(8), torch.arange(8.0)[:, None])
    assert [t.rows[:, 0].tolist() for t in tables] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0]]


def write_checkpoint(folder: Path, samples: int, world: int, lost: int | None = None) -> Checkpoint:
    """Writes a checkpoint from `world` ranks, without the file of rank `lost`. Row i is [i, -i]."""
    folder.mkdir()
    staging, files = StagingBuffer(HostCopies()), []
    for k in range(world):
        table = SampleTable(rank(k, world), samples, 2)
        table.rows.copy_(torch.arange(table.start, table.stop)[:, None] * torch.tensor([1, -1]))
        if len(table.rows) and k != lost:
            files.append(f"shard.{k + 1:05d}-of-{world:05d}.safetensors")
            staging.fill({"table": RankRows(table.rows, table.start)})
            staging.write(folder / files[-1])
    return Checkpoint(1, CheckpointTensors.open(folder, files), {}, folder)


@pytest.mark.parametrize("samples", [1, 10])
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 3), (8, 5)])
def test_rows_are_resharded_to_another_number_of_ranks(tmp_path: Path, samples: int, before: int, after: int) -> None:
    checkpoint = write_checkpoint(tmp_path / "step", samples, before)
    assert checkpoint.sharded_names() == {"table"}
    assert checkpoint.tensors["table"][:, 0].tolist() == list(range(samples))
    for k in range(after):
        table = SampleTable(rank(k, after), samples, 2)
        checkpoint.read_rows("table", RankRows(table.rows, table.start))
        assert table.rows[:, 0].tolist() == list(range(table.start, table.stop))
        assert torch.equal(table.rows[:, 1], -table.rows[:, 0])
