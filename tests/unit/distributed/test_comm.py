"""One process: devices, threads, and collectives without effect. Several processes: integration/test_rendezvous.py."""

from __future__ import annotations

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


def test_the_number_of_threads_is_set() -> None:
    before = torch.get_num_threads()
    try:
        assert DistributedSpec().build().device == torch.device("cpu")
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
        ("cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:gloo", "cuda", "cpu:gloo,cuda:gloo"),
    ],
)
def test_backend_auto_selects_torchs_default_for_the_device(backend: str, device: str, found: str) -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no nccl")
    assert DistributedSpec(backend=backend)._backend(torch.device(device)) == found
    with pytest.raises(ConfigError, match="nccl does not move tensors of cpu: use auto, or distributed.device=cuda"):
        DistributedSpec(backend="nccl")._backend(torch.device("cpu"))


def test_sync_batchnorm_is_an_error_on_one_rank() -> None:
    spec = compose("distributed.sync_batchnorm=true")
    model = spec.model.build(torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match=r"^distributed.sync_batchnorm=true has no effect on one rank: drop it"):
        spec.distributed.prepare(model, Comm(0, 1, 0, torch.device("cpu")))
