"""Errors of what the ranks report in the store of rank 0."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from clipx.distributed import rendezvous
from clipx.distributed.launch_env import LaunchEnv
from clipx.distributed.rendezvous import _check_in, _compare_facts


@pytest.mark.parametrize(
    ("hosts", "gpus", "sharing"),
    [
        ("aaaa", ["0", "1", "1", "2"], "ranks 1-2 (host a)"),
        ("aaab", ["0", "0", "0", "0"], "ranks 0-2 (host a)"),
        ("aabb", ["0", "1", "0", "1"], None),  # as in containers on one machine, which NCCL connects by the network
        ("aaaa", [None, None, None, None], None),
    ],
)
def test_ranks_that_share_a_gpu_are_named(
    hosts: str, gpus: list[str | None], sharing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    for rank, (host, gpu) in enumerate(zip(hosts, gpus, strict=True)):
        monkeypatch.setattr(rendezvous, "node_name", lambda host=host: host)
        _check_in(store, LaunchEnv(rank, 4), {"device": "cuda"}, gpu)
    error = _compare_facts(store, LaunchEnv(0, 4))
    found = "" if error is None else str(error)
    assert found.startswith(f"{sharing} share one GPU (" if sharing else "")
    assert ("start one process per GPU" in found) is (sharing is not None)
    assert (error is None) is (sharing is None)
