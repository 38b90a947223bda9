"""Sharded checkpoints: each rank writes its part, and any number of ranks reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.savers import load_tensors, make_writer, run_in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from clipx.checkpoint.format import CheckpointDir
from clipx.checkpoint.state import add_prefix, load_module, load_optimizer, optimizer_tensors, select_prefix
from clipx.distributed.comm import Comm


def built(comm: Comm, seed: int, mesh: tuple[int, ...] = ()) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Builds a model and its AdamW after two steps. Its 7 and 3 rows are not divided evenly over the ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3), nn.BatchNorm1d(3))
    if comm.world > 1:
        names = ("copies", "parts") if len(mesh) == 2 else None
        place = init_device_mesh("cpu", mesh or (comm.world,), mesh_dim_names=names)
        for layer in (*model, model):
            fully_shard(layer, mesh=place)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {**add_prefix("model", model.state_dict()), **add_prefix("optimizer", optimizer_tensors(optimizer))}


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for name, t in tensors.items()}


def _save(comm: Comm, path: Path, mesh: tuple[int, ...] = ()) -> dict[str, Tensor]:
    model, optimizer = built(comm, 0, mesh)
    run = make_writer(path, comm=comm)
    run.save(1, state(model, optimizer), {})
    run.wait()
    run.close()
    # numpy: the pipe must not share tensors
    return {name: t.numpy() for name, t in whole(state(model, optimizer)).items()}


def _load(comm: Comm, path: Path, again: Path) -> dict[str, Any]:
    """Returns the state of another model after loading, and saves it again from these ranks."""
    model, optimizer = built(comm, 1)
    found = CheckpointDir(path, pytest.fail).load_on_all(comm)
    assert found is not None
    load_module(model, select_prefix("model", found.tensors), "model")
    load_optimizer(optimizer, select_prefix("optimizer", found.tensors))
    run = make_writer(again, comm=comm)
    run.save(1, state(model, optimizer), {})
    run.wait()
    run.close()
    return {name: t.numpy() for name, t in whole(state(model, optimizer)).items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all((torch.as_tensor(one[k]) == torch.as_tensor(other[k])).all() for k in one)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3)])
def test_fsdp_checkpoints_are_saved_and_loaded_on_any_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    saved = run_in_processes(before, tmp_path, _save, tmp_path / "run")[0]
    found = run_in_processes(after, tmp_path, _load, tmp_path / "run", tmp_path / "again")
    assert len(saved) == 8 + 3 + 3 * 8, "weights and statistics, and AdamW's state of each weight"
    for rank in found:
        assert same(rank, saved)
    assert same(load_tensors(tmp_path / "run"), saved) and same(load_tensors(tmp_path / "again"), saved)
    shards = {p.name for p in (tmp_path / "run" / "step-00000001").glob("shard.*")}
    assert shards == {f"shard.{k:05d}-of-{before:05d}.safetensors" for k in range(1, before + 1)}


@pytest.mark.slow
def test_hybrid_sharding_writes_each_part_once(tmp_path: Path) -> None:
    saved = run_in_processes(4, tmp_path, _save, tmp_path / "run", (2, 2))[0]
    assert len(list((tmp_path / "run" / "step-00000001").glob("shard.*"))) == 2
    assert same(load_tensors(tmp_path / "run"), saved)
