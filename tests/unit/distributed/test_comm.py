"""One process: devices, threads, and collectives without effect. Several processes: integration/test_rendezvous.py."""

from __future__ import annotations

import torch

from clipx.distributed.comm import Agreement, Comm
from clipx.distributed.spec import DistributedSpec


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
