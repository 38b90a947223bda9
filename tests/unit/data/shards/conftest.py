"""Fixtures of the tests of remote shards. `write_shards(folder)` of the test's module writes the files of a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.s3_server import FaultyProxy, admin, new_bucket


@pytest.fixture
def proxy(proxy: FaultyProxy, own_cache: None) -> FaultyProxy:
    """The faulty proxy with a separate CLIPX_CACHE for each test."""
    return proxy


@pytest.fixture(scope="module")
def local(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the buckets. No test changes them."""
    folder = tmp_path_factory.mktemp("local")
    request.module.write_shards(folder)
    return folder


@pytest.fixture(scope="module")
def _shared(local: Path, endpoint: str) -> str:
    bucket = new_bucket(endpoint)
    upload(local, endpoint, bucket)
    return bucket


@pytest.fixture
def bucket(_shared: str, proxy: FaultyProxy) -> str:
    """A bucket of shards that clipx has not read yet. No test changes it."""
    return _shared


@pytest.fixture
def own(own_bucket: str, local: Path, endpoint: str, proxy: FaultyProxy) -> str:
    """A bucket of the same shards, which the test may change."""
    upload(local, endpoint, own_bucket)
    return own_bucket


def upload(folder: Path, endpoint: str, bucket: str) -> None:
    files = admin(endpoint)
    for path in sorted(folder.iterdir()):
        files.put_file(str(path), f"{bucket}/{path.name}")
