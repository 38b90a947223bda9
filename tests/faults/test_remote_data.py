"""Shards on a real S3 server, whole or by ranges: exact despite faults, fetched once, released, and in a limited cache."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
from helpers.loading import train_batches
from helpers.s3_server import FaultyProxy, admin, clear_caches, new_bucket
from helpers.samples import captions, img2dataset, write_tar

from clipx.data.batch import Batch
from clipx.data.images import PixelReader
from clipx.data.shards import cache
from clipx.data.shards.cache import Access
from clipx.data.shards.index import TXT
from clipx.data.shards.shard import Shard, index_shards
from clipx.data.shards.shards import Shards
from clipx.data.source import BadSample
from clipx.data.spec import training_order
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import DataError
from clipx.model.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
SHARDS, EACH = 8, 6
BATCH, STEPS = 4, 24  # two epochs


@pytest.fixture
def proxy(proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """The faulty proxy with a separate CLIPX_CACHE for each test."""
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    clear_caches()
    yield proxy
    clear_caches()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shards of the buckets. No test changes it."""
    folder = tmp_path_factory.mktemp("local")
    for k in range(SHARDS):
        write_tar(folder / f"{k:05d}.tar", img2dataset(range(k * EACH, (k + 1) * EACH)))
    return folder


def upload(folder: Path, endpoint: str, bucket: str) -> str:
    files = admin(endpoint)
    for path in sorted(folder.iterdir()):
        files.put_file(str(path), f"{bucket}/{path.name}")
    return bucket


@pytest.fixture(scope="module")
def _shared(local: Path, endpoint: str) -> str:
    return upload(local, endpoint, new_bucket(endpoint))


@pytest.fixture
def bucket(_shared: str, proxy: FaultyProxy) -> str:
    """A bucket of shards that clipx has not read yet. No test changes it."""
    return _shared


@pytest.fixture
def own(own_bucket: str, local: Path, endpoint: str, proxy: FaultyProxy) -> str:
    """A bucket of the same shards, which the test may change."""
    return upload(local, endpoint, own_bucket)


# ------------------------------------------------------------------------------------------------- whole shards


def batches(folder: str, workers: int = 0, **options: Any) -> Iterator[Batch]:
    defaults = {
        "read": "stream",
        "samples_per_shard": EACH,
        "held_out_share": 0.0,
        "retry_s": 600.0,
        "batch_size": BATCH,
    }
    shards = f"{folder}/{{00000..{SHARDS - 1:05d}}}.tar"
    data = WebDatasetSpec(name="far", shards=shards, shuffle_window=12, streams=2, **{**defaults, **options})
    opened = data.open()
    order, images = training_order(data, opened, 3, ranks=1), PixelReader((12,), [0.5, 1.0], 10**6)
    samples = range(STEPS * BATCH)
    return train_batches(opened.train, order, images, Tokenizer(16), samples, BATCH, seed=3, workers=workers)


def indices(found: list[Batch]) -> list[list[int]]:
    return [batch.index.tolist() for batch in found]


@pytest.fixture(scope="module")
def expected(local: Path) -> list[list[int]]:
    return indices(list(batches(str(local))))


def cached_shards() -> list[Path]:
    return sorted((Path(os.environ["CLIPX_CACHE"]) / "shards").glob("*.tar"))


def test_streams_from_s3_equal_local_ones_and_each_shard_is_fetched_once(
    bucket: str, proxy: FaultyProxy, local: Path, expected: list[list[int]]
) -> None:
    found = list(batches(bucket, workers=2, cache_gb=1.0))
    assert indices(found) == expected
    assert not [bad for batch in found for bad in batch.bad]
    assert proxy.requests <= 2 * SHARDS + 4  # a look-up and one range of each shard, although both epochs read it
    assert sum(batch.traffic.requests for batch in found) >= 2 * SHARDS
    size = sum(path.stat().st_size for path in local.glob("*.tar"))
    assert sum(batch.traffic.bytes for batch in found) >= size
    assert len(cached_shards()) == SHARDS


def test_a_full_disk_costs_requests_but_no_sample(
    bucket: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("clipx.data.shards.cache.os.truncate", full)
    found = list(batches(bucket))
    assert indices(found) == expected
    assert not [bad for batch in found for bad in batch.bad]
    assert "No space left on device; reading it by ranges" in capfd.readouterr().err


def test_faults_of_the_storage_change_nothing_and_released_shards_are_removed(
    bucket: str, proxy: FaultyProxy, expected: list[list[int]]
) -> None:
    stream = batches(bucket)
    found, most = [next(stream)], 0
    proxy.set("some", 3)
    for batch in stream:
        found.append(batch)
        most = max(most, len(cached_shards()))
    assert indices(found) == expected
    assert not [bad for batch in found for bad in batch.bad]
    assert 2 <= most <= SHARDS - 1, "without a limit, released shards are removed"


def test_missing_truncated_and_shorter_shards_cost_only_their_places(
    own: str, endpoint: str, local: Path, tmp_path: Path
) -> None:
    fs = admin(endpoint)
    fs.pipe_file(f"{own}/sizes.json", json.dumps({f"{k:05d}.tar": EACH for k in range(SHARDS)}).encode())
    fs.rm_file(f"{own}/00001.tar")
    content = (local / "00002.tar").read_bytes()
    fs.pipe_file(f"{own}/00002.tar", content[: len(content) // 2])
    fs.put_file(str(write_tar(tmp_path / "short.tar", img2dataset(range(18, 22)))), f"{own}/00003.tar")
    options: dict[str, Any] = {"max_bad_share": 1.0, "samples_per_shard": None}
    found = list(batches(own, **options))
    bad = {(bad.key.rpartition("/")[2].partition(":")[0], bad.reason) for batch in found for bad in batch.bad}
    reasons = dict(bad)
    assert reasons.keys() == {"00001.tar", "00002.tar", "00003.tar"}
    assert reasons["00001.tar"] == "shard has 0 of the 6 samples that sizes.json lists; shard does not exist"
    assert reasons["00002.tar"].startswith("shard has 4 of the 6 samples that sizes.json lists; shard is cut off")
    assert reasons["00003.tar"] == "shard has 4 of the 6 samples that sizes.json lists"
    assert indices(list(batches(own, **options))) == indices(found)


# ------------------------------------------------------------------------------------------------------- ranges


def by_ranges(url: str) -> Shards:
    data = WebDatasetSpec(name="far", shards=url, held_out_share=0.0, read="range", retry_s=600.0)
    source = data.open().train
    assert isinstance(source, Shards)
    return source


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("mode", "amount"), [("down", 0), ("cut", 700)])
def test_an_outage_loses_no_sample_and_a_longer_one_is_an_error(
    bucket: str, proxy: FaultyProxy, mode: str, amount: int
) -> None:
    source = by_ranges(f"{bucket}/*.tar")
    source.read(0)
    start = time.monotonic()
    proxy.set(mode, amount)
    threading.Timer(1.5, proxy.set, ("up",)).start()
    assert source.read(7).captions == ["caption 7"]
    assert time.monotonic() - start > 1, "the read is retried during the outage"
    proxy.set(mode, amount)
    access = replace(source.access, retry_s=2.0)
    impatient = replace(source, shards=[replace(shard, access=access) for shard in source.shards])
    with pytest.raises(
        DataError, match=rf"^{bucket}/00001.tar cannot be read: the storage failed for \d+ s \(.+\): check"
    ):
        impatient.read(7)
    proxy.set("up")
    assert captions(source) == [f"caption {i}" for i in range(SHARDS * EACH)]


def test_permanent_errors_are_not_retried(own: str, proxy: FaultyProxy, endpoint: str) -> None:
    """The proxy answers what is counted: a request that a busy server drops would be repeated."""
    source = by_ranges(f"{own}/*.tar")
    proxy.set("status", 404)
    before = proxy.requests
    with pytest.raises(BadSample, match="^shard cannot be read: "):
        source.read(7)
    assert proxy.requests - before == 1
    proxy.set("up")
    admin(endpoint).pipe_file(f"{own}/00002.tar", bytes(5000))
    for index in (13, 17):
        with pytest.raises(BadSample, match="^shard (is shorter than recorded in its index|cannot be read: )"):
            source.read(index)
    proxy.set("status", 403)
    clear_caches()  # fsspec's list of the bucket
    before = proxy.requests
    with pytest.raises(DataError, match=r"shard \S+/00000.tar cannot be opened \("):
        by_ranges(f"{own}/00000.tar")
    assert proxy.requests - before == 1


# ------------------------------------------------------------------------------------------------------- cache


def test_the_cache_evicts_the_least_recently_used_shard(bucket: str, local: Path, tmp_path: Path) -> None:
    found = index_shards([Shard(f"{bucket}/{k:05d}.tar", (TXT,), Access()) for k in range(3)])
    limit = sum(sorted(shard.size for shard in found)[1:])
    files = [replace(shard, access=Access(20.0, limit, str(tmp_path / "own"))) for shard in found]
    for k in (0, 1):
        cache.store(files[k])
    os.utime(files[0].cache_path, (1, 1))
    os.utime(files[1].cache_path, (2, 2))
    other = tmp_path / "own" / "00000.tar"
    other.touch()
    os.utime(other, (0, 0))
    files[0].fetch((0, 512))  # most recently used
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
    (file,) = index_shards([Shard(url, (TXT,), Access(600.0, 10**9))])
    place = file.cache_path
    partial = (place.with_name(f"{0:032x}.part"), place.with_suffix(".part"))  # of another shard, and of this one
    for path in partial:  # of a killed process
        path.write_bytes(bytes(100))
    downloads: list[str] = []
    write = Shard.write

    def counted(self: Shard, out: IO[bytes]) -> None:
        downloads.append(self.url)
        write(self, out)

    monkeypatch.setattr(Shard, "write", counted)  # not requests: a busy server may let one be repeated
    proxy.set("slow", 0.5)
    threads = [threading.Thread(target=cache.store, args=(file,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert downloads == [file.url]
    assert [path.name for path in cached_shards()] == [f"{file.version}.tar"]
    assert [path.exists() for path in partial] == [False, False]
    assert place.stat().st_size == file.size
