"""Files of the Hugging Face hub: their URLs, and reads by range without a list."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.hub_server import Hub

from clipx.errors import DataError
from clipx.storage import hub_repository, remote
from clipx.storage.hub_repository import HubFile
from clipx.storage.remote import read_range, take_traffic


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path))
    hub_repository._listed.cache_clear()


def test_urls_of_files() -> None:
    for url, parts in (
        ("hf://datasets/o/n/a/b.tar", ("dataset", "o/n", "main", "a/b.tar")),
        ("hf://datasets/o/n@dev/b.tar", ("dataset", "o/n", "dev", "b.tar")),
        ("hf://datasets/o/n@refs/convert/parquet/a/b.tar", ("dataset", "o/n", "refs/convert/parquet", "a/b.tar")),
        ("hf://datasets/o/n@refs%2Fpr%2F3/b.tar", ("dataset", "o/n", "refs/pr/3", "b.tar")),
        ("hf://o/n/b.tar", ("model", "o/n", "main", "b.tar")),
        ("hf://spaces/o/n", ("space", "o/n", "main", "")),
    ):
        found = HubFile.parse(url)
        assert found == HubFile(*parts), url
        assert HubFile.parse(f"{found.root}/{found.path}") == found
    for url in ("hf://datasets/o", "hf://buckets/o/n/a", "s3://o/n", "/o/n", "hf://"):
        assert HubFile.parse(url) is None, url


def test_a_range_costs_one_read_and_no_list(hub: Hub) -> None:
    hub.commit("o/n", {"a b#.bin": bytes(range(200))})
    take_traffic()
    assert read_range("hf://datasets/o/n/a b#.bin", 10, 20, 5.0) == bytes(range(10, 20))
    traffic = take_traffic()
    assert (traffic.requests, traffic.bytes, hub.count("/api/datasets/")) == (1, 10, 0)


def test_a_server_without_ranges_is_an_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("o/n", {"a.bin": bytes(100)})
    hub.fault = lambda path: "whole"
    with pytest.raises(DataError, match="ignores range requests"):
        read_range("hf://datasets/o/n/a.bin", 0, 10, 5.0)
    monkeypatch.setattr(remote, "ask", lambda url, method, **_: bytes(100))  # of another library than that of HTTP
    with pytest.raises(DataError, match="ignores range requests"):
        read_range("s3://bucket/a.bin", 0, 10, 5.0)
