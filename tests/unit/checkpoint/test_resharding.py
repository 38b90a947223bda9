"""Tensors that any number of ranks wrote by rows, read in full and by the rows of any other number of ranks."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from clipx.checkpoint.format import Checkpoint
from clipx.checkpoint.records import DamagedCheckpoint
from clipx.checkpoint.staging import HostCopies, StagingBuffer
from clipx.checkpoint.tensors import CheckpointTensors, RankRows
from clipx.errors import CheckpointError

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])


@st.composite
def matrices(draw: st.DrawFn) -> dict[str, Tensor]:
    """Draws matrices by name, of any kind of numbers, some with fewer rows than there are ranks."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=4))
    return {
        f"model/{k}": (torch.arange(rows * width).view(rows, width) % 251).to(draw(DTYPES))
        for k, (rows, width) in enumerate(shapes)
    }


def share(tensor: Tensor, rank: int, world: int) -> RankRows:
    """Returns the rows of a rank as FSDP2 divides them: all ranks but the last ones have equally many."""
    each = -(-len(tensor) // world)
    start = min(rank * each, len(tensor))
    return RankRows(tensor[start : start + each].clone(), start)


def write(within: Path, tensors: dict[str, Tensor], world: int) -> tuple[Path, list[str]]:
    """Writes the file of each rank into a new folder, with a tensor that rank 0 has alone. Returns folder and names."""
    folder, names = Path(tempfile.mkdtemp(dir=within)), []
    for rank in range(world):
        shares = {name: share(tensor, rank, world) for name, tensor in tensors.items()}
        own: dict[str, Tensor | RankRows] = {name: rows for name, rows in shares.items() if len(rows.tensor)}
        copies = HostCopies()
        buffer = StagingBuffer(copies)
        buffer.fill({**own, "step": torch.tensor(7)} if rank == 0 else own)
        copies.synchronize()
        names.append(f"shard.{rank}.safetensors")
        buffer.write(folder / names[-1])
        buffer.release()
        assert load_file(folder / names[-1]).keys() == {*own, *(["step"] if rank == 0 else [])}
    return folder, names


@given(tensors=matrices(), before=st.integers(1, 5), after=st.integers(1, 5))
def test_any_ranks_read_what_any_others_wrote(
    tmp_path: Path, tensors: dict[str, Tensor], before: int, after: int
) -> None:
    folder, names = write(tmp_path, tensors, before)
    found = CheckpointTensors.open(folder, names)
    assert {name: found.shape(name) for name in found} == {"step": []} | {n: [*t.shape] for n, t in tensors.items()}
    assert found.sharded_names() == {*tensors}
    assert found["step"] == 7
    checkpoint = Checkpoint(1, found, {}, folder)
    for name, whole in tensors.items():
        assert found[name].dtype == whole.dtype and torch.equal(found[name], whole)
        for rank in range(after):
            rows = share(torch.zeros_like(whole), rank, after)
            checkpoint.read_rows(name, rows)
            assert torch.equal(rows.tensor, share(whole, rank, after).tensor)


@given(tensors=matrices(), world=st.integers(2, 5), data=st.data())
def test_the_rows_of_a_missing_file_are_an_error(
    tmp_path: Path, tensors: dict[str, Tensor], world: int, data: st.DataObject
) -> None:
    lost = data.draw(st.integers(0, world - 1), "lost")
    folder, names = write(tmp_path, tensors, world)
    missing = {name for name, tensor in tensors.items() if len(share(tensor, lost, world).tensor)}
    left = [name for rank, name in enumerate(names) if rank != lost]
    with contextlib.suppress(DamagedCheckpoint):  # rows are missing before others
        found = CheckpointTensors.open(folder, left)
        for name in missing:
            with pytest.raises(CheckpointError, match="lacks rows"):
                Checkpoint(1, found, {}, folder).read_rows(name, RankRows(tensors[name].clone(), 0))
        assert all(torch.equal(found[name], tensors[name]) for name in tensors.keys() - missing)
