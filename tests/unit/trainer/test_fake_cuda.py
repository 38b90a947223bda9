"""A training step on a CUDA device without values: no mix of devices, no hidden host read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.cases import slow_except
from helpers.fake_cuda import CUDA, FakeCuda, HostRead, MixedDevices, fake_cuda, fake_learner, host_batch
from helpers.runs import VIT
from helpers.steps import take_step
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from clipx.distributed.comm import Comm
from clipx.model.layers import named_blocks

# One block in each tower: what counts is the number of operations.
SHALLOW = (*VIT, "model.image.options={patch_size:16,embed_dim:64,depth:1,num_heads:2}", "model.text.layers=1")
RHO = "objective.rho=2.9"
OBJECTIVES = {
    **{name: (f"objective={name}",) for name in ("dcl", "siglip", "fastclip_v1")},
    **{name: (f"objective={name}", RHO) for name in ("isogclr", "fastclip_v2")},
    "neuclip": ("objective=neuclip", RHO, "objective.prototypes=48", "objective.tile=16"),
    "drrho_clip": ("objective=drrho_clip", RHO, "teacher.embeddings=none"),
}
OPTIMIZERS = ("adamw", "sgd", "lamb", "lion", "muon")
FORMATS = ("amp_bf16", "amp_fp16", "bf16", "fp16")
CASES = {
    **OBJECTIVES,
    **{name: (f"precision={name}",) for name in FORMATS},
    "micro_batches_bf16": ("data.micro_batches=2", "precision=bf16", "objective=fastclip_v3", RHO),
    "average": ("optimizer.ema_decay=0.9", "precision=bf16"),
    "checkpointing": ("model.image.checkpointing=1", "model.text.checkpointing=selective", "precision=amp_bf16"),
    "padded": ("model.text.packed=false",),
    "captions": ("data.captions_per_step=2", "objective.same_caption=mask", "data.micro_batches=2"),
    "siglip_captions": ("objective=siglip", "data.captions_per_step=2", "objective.same_caption=positive"),
    **{name: (f"optimizer={name}", "optimizer.clip_norm=1", "optimizer.non_finite=skip") for name in OPTIMIZERS},
}


def step(device: FakeCuda, *overrides: str, steps: int = 2) -> None:
    """Makes steps of a small run on the fake device, which wait for nothing. The last one is logged in detail."""
    with device.allowed():
        learner = fake_learner(*overrides)
    for i in range(steps):
        batch = host_batch(learner.spec, i).to(CUDA)
        metrics = take_step(learner, batch, i, detailed=i == steps - 1)
        assert all(value.device == CUDA and value.ndim == 0 for value in metrics.values())


@pytest.mark.parametrize(
    "case", slow_except(CASES, *"siglip_captions fastclip_v2 neuclip drrho_clip adamw lion micro_batches_bf16".split())
)
def test_a_step_has_all_tensors_on_the_device(case: str) -> None:
    with fake_cuda() as device:
        step(device, *SHALLOW, *CASES[case])


def test_norms_of_offloaded_shards_and_of_the_device_are_joined_on_the_device() -> None:
    """distributed.cpu_offload: the gradients of the model are shards on the host, the temperature's on the device."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        with fake_cuda() as device:
            shard = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
            with device.allowed():  # the norm of the shards is on the host
                norm = Comm(0, 2, 0, CUDA).norm([shard, torch.ones((), device="cuda")])
        assert norm.device == CUDA and norm.ndim == 0
    finally:
        torch.distributed.destroy_process_group()


def test_blocks_are_compiled_by_default() -> None:
    with fake_cuda() as device, device.allowed():
        learner = fake_learner(*SHALLOW, "compile.towers=auto", "compile.backend=aot_eager")
    assert learner.compile_choice == "compile.towers=auto chose true"
    assert all(block._compiled_call_impl is not None for block in named_blocks(learner.model).values())


def test_a_mix_of_devices_raises_an_error() -> None:
    with fake_cuda():
        there = torch.ones(3, device="cuda")
        with pytest.raises(MixedDevices, match="tensors of cuda .* and of the CPU"):
            there + torch.ones(3)
        with pytest.raises(MixedDevices):  # numbers of both devices
            torch.stack([there.sum(), torch.ones(3).sum()])
        assert (there * torch.tensor(2.0)).device == CUDA  # an argument of the kernel


def test_a_host_read_raises_an_error() -> None:
    reads: list[Callable[[Tensor], object]] = [
        *(lambda x: x.sum().item(), lambda x: bool(x.sum() > 0), lambda x: x.cpu(), lambda x: x.tolist()),
        *(lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: torch.equal(x, x), lambda x: torch.arange(3).to("cuda")),
        *(lambda x: torch.tensor(2.0, device="cuda"), lambda x: torch.ones(3).copy_(x)),
        lambda x: torch.cuda.current_stream().synchronize(),
    ]
    with fake_cuda():
        there = torch.ones(3, device="cuda")
        for read in reads:
            with pytest.raises(HostRead):
                read(there)
