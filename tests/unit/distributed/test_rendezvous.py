"""Errors of rank 0's store."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from clipx.distributed.launch_env import LaunchEnv
from clipx.distributed.rendezvous import _start_store
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
        with pytest.raises(
            ConfigError, match=f"^MASTER_PORT={port} cannot be bound on .*: another process listens there"
        ):
            _start_store(LaunchEnv(0, 2, port=port))
    with no_free_file(), pytest.raises(ConfigError) as raised:
        _start_store(LaunchEnv(0, 2, port=port))
    assert str(raised.value).endswith("(Too many open files): correct that, or set another MASTER_PORT on all ranks")
