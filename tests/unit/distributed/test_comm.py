"""One process: devices, threads, and collectives without effect. Several processes: integration/test_rendezvous.py."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.runs import compose

from clipx.distributed.comm import Agreement, Comm
from clipx.distributed.spec import DistributedSpec
from clipx.errors import ConfigError


def test_with_one_rank_every_collective_is_the_identity() -> None:
    comm = Comm(0, 1, 0, torch.device("cpu"))
    x = torch.randn(3, 2)
    assert comm.gather(x) is x
    assert comm.sum(x) is x
    assert comm.gather_objects("a") == ["a"]
    assert Agreement().exchange(comm, 3) == 3
    assert comm.run_on_main(lambda: 7) == 7
    comm.require_equal(config={"seed": 0}, data="a fingerprint")
    comm.barrier()


def test_a_norm_of_offloaded_gradients_is_on_the_device_of_the_run() -> None:
    """Gradients of the model are on the host with cpu_offload, and those of the objective are not."""
    norm = Comm(0, 1, 0, torch.device("meta")).norm([torch.ones(3), torch.ones(1)])
    assert (norm.device.type, norm.ndim) == ("meta", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_rejected() -> None:
    with pytest.raises(ConfigError, match="distributed.device=cuda but no CUDA device is visible: use distributed=cpu"):
        DistributedSpec(device="cuda").build()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_missing_accelerator_is_rejected_and_auto_selects_the_cpu() -> None:
    with pytest.raises(ConfigError, match="distributed.device=npu but no npu device is visible: use distributed=cpu"):
        DistributedSpec(device="npu").build()
    assert DistributedSpec().build().device == torch.device("cpu")


def test_the_number_of_threads_is_set() -> None:
    before = torch.get_num_threads()
    try:
        DistributedSpec(device="cpu").build()
        assert torch.get_num_threads() == before, "one process keeps torch's number"
        DistributedSpec(device="cpu", threads=before + 1).build()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("backend", "device", "found"),
    [
        ("auto", "cpu", "gloo"),
        ("auto", "cuda", "cpu:gloo,cuda:nccl"),
        ("auto", "xpu", "cpu:gloo,xpu:xccl"),
        ("gloo", "cuda", "gloo"),
        ("nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:gloo", "cuda", "cpu:gloo,cuda:gloo"),
    ],
)
def test_backend_auto_selects_torchs_default_for_the_device(backend: str, device: str, found: str) -> None:
    if "nccl" in backend and not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no nccl")
    assert DistributedSpec(backend=backend)._backend(torch.device(device)) == found


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("ncll", "distributed.backend=ncll: torch .* has no backend ncll: choose from .*gloo.*, or auto"),
        ("cpu:gloo,cuda:ncll", "distributed.backend=cpu:gloo,cuda:ncll: torch .* has no backend ncll"),
        ("nccl", "distributed.backend=nccl does not move tensors of cpu: use auto, or distributed.device=cuda"),
    ],
)
def test_a_missing_or_unsuitable_backend_is_rejected(backend: str, message: str) -> None:
    if backend == "nccl" and not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no nccl")
    with pytest.raises(ConfigError, match=message):
        DistributedSpec(backend=backend)._backend(torch.device("cpu"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("distributed.backend=horovod", "torch .* has no backend horovod: choose from .*gloo.*, or auto"),
        ("distributed.backend=hccl", "torch .* has no backend hccl: choose from"),
        ("distributed.backend=gloo", "has no effect on one rank: remove it, or start several ranks with torchrun"),
        ("distributed.static_graph=true", "has no effect on one rank"),
        ("distributed.bucket_mb=50", "has no effect on one rank"),
        ("distributed.gradient_as_bucket_view=true", "has no effect on one rank"),
        ("distributed.compression=bf16", "has no effect on one rank"),
        ("distributed=fsdp distributed.reshard_after_forward=false", "has no effect on one rank"),
        ("distributed=fsdp distributed.cpu_offload=true", "has no effect on one rank"),
        ("precision=amp_bf16 distributed=fsdp distributed.param_dtype=bfloat16", "has no effect on one rank"),
        ("distributed=fsdp distributed.reduce_dtype=float32", "has no effect on one rank"),
    ],
)
def test_options_between_ranks_are_errors_on_one_rank(overrides: str, message: str) -> None:
    key = overrides.split()[-1].partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key}=[^ ]*:? ?{message}"):
        compose(*overrides.split(), "distributed.device=cpu").distributed.build()


def test_sync_batchnorm_is_an_error_on_one_rank() -> None:
    spec = compose("distributed.sync_batchnorm=true")
    model = spec.model.build(torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match=r"^distributed.sync_batchnorm=true has no effect on one rank: drop it"):
        spec.distributed.prepare(model, Comm(0, 1, 0, torch.device("cpu")))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "tpu"), ("backend", "gloo,nccl"), ("timeout_s", 0.0), ("timeout_s", math.inf), ("rendezvous_s", 0.0),
        ("rendezvous_s", math.nan), ("watchdog_s", -1.0), ("watchdog_s", math.nan), ("threads", 0),
    ],
)  # fmt: skip
def test_values_out_of_range_are_rejected(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"distributed.{field}={value}"):
        DistributedSpec(**{field: value})
