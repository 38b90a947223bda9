"""Reports of the ranks in the store of rank 0: digests of their configuration, and their GPUs."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from clipx.distributed import rendezvous
from clipx.distributed.consistency import describe_mismatch, digest
from clipx.distributed.launch_env import LaunchEnv
from clipx.distributed.rendezvous import _check_in, _compare_facts


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


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


@pytest.mark.parametrize(
    ("values", "described"),
    [
        ("aaaa", None),
        ("aaab", "rank 3 (host n1) has x=b, the others a"),
        ("abbb", "rank 0 (host n0) has x=a, the others b"),
        ("aaaabbca", "ranks 4-5 (host n2) have x=b; rank 6 (host n3) has x=c, the others a"),
        ("aaabcdefgh", "rank 3 (host n1) has x=b; rank 4 (host n2) has x=c; rank 5 (host n2) has x=d; "
         "rank 6 (host n3) has x=e; and 3 more, the others a"),
    ],
)  # fmt: skip
def test_differing_ranks_are_named(values: str, described: str | None) -> None:
    assert describe_mismatch("x", values, [f"n{rank // 2}" for rank in range(len(values))]) == described
