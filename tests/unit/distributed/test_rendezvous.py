"""Errors of rank 0's store, and of what the ranks report there."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from clipx.distributed import rendezvous
from clipx.distributed.launch_env import LaunchEnv
from clipx.distributed.rendezvous import _check_in, _compare_facts, _start_store
from clipx.errors import ConfigError


@contextlib.contextmanager
def no_free_file() -> Iterator[None]:
    """Opens files up to a lowered limit of the process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 8, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for file in opened:
            os.close(file)


def test_a_port_in_use_is_told_from_other_faults() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^MASTER_PORT={port} cannot be bound on .*: another process listens"):
            _start_store(LaunchEnv(0, 2, port=port))
    with no_free_file(), pytest.raises(ConfigError) as raised:
        _start_store(LaunchEnv(0, 2, port=port))
    assert str(raised.value).endswith("(Too many open files): correct that, or set another MASTER_PORT on all ranks")


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
