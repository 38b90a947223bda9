"""Shards on a real S3 server: reads equal local reads, also during storage faults and with the shard cache."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
from helpers.s3_server import FaultyProxy, admin, clear_caches
from helpers.samples import captions, img2dataset, read_all, write_tar
from helpers.waiting import wait_until

from clipx.data.batch import Batch
from clipx.data.loader import train_loader
from clipx.data.order import Order
from clipx.data.shards import cache
from clipx.data.shards.cache import Access, ShardFile
from clipx.data.shards.index import index_shards
from clipx.data.shards.remote import fetch
from clipx.data.shards.shards import Shards
from clipx.data.shards.tar import TXT
from clipx.data.source import BadSample, Source
from clipx.data.views import ImageView
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import DataError
from clipx.model.tokenizer import Tokenizer

SIZES = (6, 9, 5)
CAPTIONS = [f"caption {i}" for i in range(sum(SIZES))]


def write_shards(folder: Path) -> None:
    start = 0
    for k, size in enumerate(SIZES):
        write_tar(folder / f"{k:05d}.tar", img2dataset(range(start, start + size)))
        start += size


def open_train(url: str, **options: float) -> Source:
    return (
        WebDatasetSpec(name="far", shards=url, held_out_share=0.0, read="range", **{"retry_s": 600.0, **options})
        .open()
        .train
    )


# ------------------------------------------------------------------------------------------------------ reading


def test_shards_on_s3_equal_local_shards(bucket: str, local: Path) -> None:
    far, near = open_train(f"{bucket}/*.tar"), open_train(f"{local}/*.tar")
    assert read_all(far) == read_all(near)
    assert (far.sizes, far.fingerprint) == (near.sizes, near.fingerprint)
    assert far.key(0) == f"{bucket}/00000.tar:000000000.jpg"
    back = pickle.loads(pickle.dumps(far))
    assert isinstance(back, Shards) and read_all(back) == read_all(far)


def test_a_sample_costs_one_request_and_prefetches_run_in_parallel(bucket: str, proxy: FaultyProxy) -> None:
    index_shards([f"{bucket}/00001.tar"], TXT)
    assert proxy.requests <= 6, "its size, the counts next to it, the counts of the folder, and the shard"
    source = open_train(f"{bucket}/*.tar")
    source.read(0)
    proxy.requests = 0
    for i in range(10):
        assert source.read(i).captions == [f"caption {i}"]
        assert proxy.requests == i + 1
    proxy.set("hang")
    source.prefetch(range(10))  # type: ignore[attr-defined]
    wait_until(lambda: proxy.requests == 20)
    proxy.set("up")
    assert [source.read(i).captions for i in range(10)] == [[f"caption {i}"] for i in range(10)]
    assert proxy.requests == 20, "all requests start before the first is answered"


# ------------------------------------------------------------------------------------------------------- faults


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("mode", "amount"), [("down", 0), ("cut", 700)])
def test_an_outage_loses_no_sample_and_a_longer_one_is_an_error(
    bucket: str, proxy: FaultyProxy, mode: str, amount: int
) -> None:
    source = open_train(f"{bucket}/*.tar")
    assert isinstance(source, Shards)
    source.read(0)
    start = time.monotonic()
    proxy.set(mode, amount)
    threading.Timer(1.5, proxy.set, ("up",)).start()
    assert source.read(7).captions == ["caption 7"]
    assert time.monotonic() - start > 1, "the read is retried during the outage"
    proxy.set(mode, amount)
    with pytest.raises(
        DataError, match=rf"^{bucket}/00001.tar cannot be read: the storage failed for \d+ s \(.+\): check"
    ):
        source.with_access(replace(source.access, retry_s=2.0)).read(7)
    proxy.set("up")
    assert captions(source) == CAPTIONS


def test_permanent_errors_are_not_retried(own: str, proxy: FaultyProxy, endpoint: str) -> None:
    """The proxy answers what is counted: a request that a busy server drops would be repeated."""
    source = open_train(f"{own}/*.tar")
    proxy.set("status", 404)
    before = proxy.requests
    with pytest.raises(BadSample, match="^shard cannot be read: "):
        source.read(7)
    assert proxy.requests - before == 1
    proxy.set("up")
    admin(endpoint).pipe_file(f"{own}/00002.tar", bytes(5000))
    for index in (16, 19):
        with pytest.raises(BadSample, match="^shard (is shorter than recorded in its index|cannot be read: )"):
            source.read(index)
    proxy.set("status", 403)
    clear_caches()  # fsspec's list of the bucket
    before = proxy.requests
    with pytest.raises(DataError, match=r"shard \S+/00000.tar cannot be opened \("):
        open_train(f"{own}/00000.tar")
    assert proxy.requests - before == 1


# --------------------------------------------------------------------------------------------------- in the loader

TOKENIZER = Tokenizer(16)
VIEW = ImageView(size=12, crop_scale=[0.5, 1.0], max_pixels=10**6)


def batches(source: Source, workers: int = 0) -> Iterator[Batch]:
    order = Order(source.sizes, seed=3, window=30)
    return iter(
        train_loader(
            source, order, VIEW, TOKENIZER, seed=3, samples=range(60), batch=10, rank=0, world=1, workers=workers,
            prefetch=2, pin=False,
        )
    )  # fmt: skip


def equal_batches(found: list[Batch], expected: list[Batch]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(bool((a.image == b.image).all()) and a.index.tolist() == b.index.tolist() for a, b in pairs)


@pytest.fixture(scope="module")
def expected(local: Path) -> list[Batch]:
    return list(batches(open_train(f"{local}/*.tar")))


def test_workers_read_the_same_stream_despite_faults(bucket: str, expected: list[Batch], proxy: FaultyProxy) -> None:
    source = open_train(f"{bucket}/*.tar", cache_gb=1.0)
    source.read(0)  # opens the connection before the workers are forked
    proxy.set("some", 3)
    found = list(batches(source, workers=2))
    assert equal_batches(found, expected)
    assert not [bad for batch in found for bad in batch.bad]


# ----------------------------------------------------------------------------------------------------- shard cache


def cached_shards() -> list[str]:
    return sorted(path.name for path in (Path(os.environ["CLIPX_CACHE"]) / "shards").glob("*.tar"))


def test_the_cache_evicts_the_least_recently_used_shard(bucket: str, local: Path, tmp_path: Path) -> None:
    found = index_shards([f"{bucket}/{k:05d}.tar" for k in range(3)], TXT)
    limit = sum(sorted(index.size for index in found)[1:])
    files = [
        ShardFile(
            f"{bucket}/{k:05d}.tar", Path(index.table).stem, index.size, Access(20.0, limit, str(tmp_path / "own"))
        )
        for k, index in enumerate(found)
    ]
    for k in (0, 1):
        cache.store(files[k])
    os.utime(files[0].cache_path, (1, 1))
    os.utime(files[1].cache_path, (2, 2))
    other = tmp_path / "own" / "00000.tar"
    other.touch()
    os.utime(other, (0, 0))
    fetch(files[0], 0, 512)  # most recently used
    cache.store(files[2])
    assert [file.cache_path.exists() for file in files] == [True, False, True]
    assert other.exists(), "a file that the cache has not written"
    assert sum(p.stat().st_size for p in (tmp_path / "own").iterdir()) <= limit
    for k in (0, 2):
        assert files[k].cache_path.read_bytes() == (local / f"{k:05d}.tar").read_bytes()


def test_concurrent_fetches_download_a_shard_once_and_remove_partial_files(
    bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/00001.tar"
    (found,) = index_shards([url], TXT)
    file = ShardFile(url, Path(found.table).stem, found.size, Access(600.0, 10**9))
    place = file.cache_path
    partial = (place.with_name(f"{0:032x}.part"), place.with_suffix(".part"))  # of another shard, and of this one
    for path in partial:  # of a killed process
        path.write_bytes(bytes(100))
    downloads: list[str] = []
    write = ShardFile.write

    def counted(self: ShardFile, out: IO[bytes]) -> None:
        downloads.append(self.url)
        write(self, out)

    monkeypatch.setattr(ShardFile, "write", counted)  # not requests: a busy server may let one be repeated
    proxy.set("slow", 0.5)
    threads = [threading.Thread(target=cache.store, args=(file,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert downloads == [file.url]
    assert cached_shards() == [f"{file.version}.tar"]
    assert [path.exists() for path in partial] == [False, False]
    assert place.stat().st_size == file.size
