"""Who a process is, by its environment."""

from __future__ import annotations

import pytest
import torch

from clipx.distributed import Comm, DistributedSpec, _first_host, _place
from clipx.errors import ConfigError

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_STEP_ID")
LAUNCHER += ("SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")
STEP = {
    "SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "n1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (5, 8, 1)),
        (STEP, (3, 4, 1)),
        ({**STEP, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, (0, 2, 0)),
        ({**STEP, "SLURM_STEP_ID": "interactive"}, (0, 1, 0)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, (0, 1, 0)),
    ],
    ids=["alone", "torchrun", "srun", "torchrun under srun", "a shell in an allocation", "a step of one task"],
)
def test_rank_and_world_come_from_the_launcher(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], place: tuple[int, int, int]
) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _place() == place


def test_srun_fills_in_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    _place()
    import os

    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("n1", "15077")
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.delenv("MASTER_PORT")


def test_a_list_of_hosts_without_scontrol_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="set MASTER_ADDR to the first host"):
        _first_host("n[1-4]")


def test_with_one_rank_every_collective_is_the_identity() -> None:
    comm = Comm(0, 1, 0, torch.device("cpu"))
    x = torch.randn(3, 2)
    assert comm.gather(x) is x
    assert comm.sum(x) is x
    assert comm.gather_objects("a") == ["a"]
    assert comm.on_main(lambda: 7) == 7
    comm.barrier()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="distributed.device=cuda but no CUDA device is visible: use distributed=cpu"):
        DistributedSpec(device="cuda").build()


@pytest.mark.parametrize(("field", "value"), [("device", "tpu"), ("timeout_s", 0.0)])
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"distributed.{field}={value}"):
        DistributedSpec(**{field: value})
