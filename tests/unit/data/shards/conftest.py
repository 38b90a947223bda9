"""Fixture of the tests of remote shards."""

from __future__ import annotations

import pytest
from helpers.s3_server import FaultyProxy


@pytest.fixture
def proxy(proxy: FaultyProxy, own_cache: None) -> FaultyProxy:
    """The faulty proxy with a separate CLIPX_CACHE for each test."""
    return proxy
