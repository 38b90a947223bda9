"""Requests to a real S3 server in a process that forks."""

from __future__ import annotations

import gc
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
from fsspec.asyn import get_loop
from helpers.s3_server import admin

from clipx.storage.remote import read_file

CONNECTIONS = 8


def read_in_parallel(url: str) -> list[bytes]:
    """Reads a file by several connections at once. An error of any of them is raised: no request is retried."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return list(pool.map(lambda _: read_file(url, retry_s=0), range(CONNECTIONS)))


def read_and_collect(url: str) -> None:
    """Reads a file in a forked process, and collects garbage in its thread of requests.

    fsspec drops the parent's file systems after a fork. Once collected in that thread, they close their connections.
    """
    read_file(url, retry_s=60)
    get_loop().call_soon_threadsafe(gc.collect)
    read_file(url, retry_s=60)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_leaves_the_connections_of_its_parent_open(own_bucket: str, endpoint: str) -> None:
    url = f"{own_bucket}/file"
    admin(endpoint).pipe_file(url, b"content")
    read_in_parallel(url)
    child = multiprocessing.get_context("fork").Process(target=read_and_collect, args=(url,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert read_in_parallel(url) == [b"content"] * CONNECTIONS
