"""Whole shards on a real S3 server: fetched once per machine, ahead of their use, released, and exact despite faults."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.s3_server import FaultyProxy, admin
from helpers.samples import img2dataset, write_tar

from clipx.data.batch import Batch
from clipx.data.loader import train_loader
from clipx.data.spec import training_order
from clipx.data.views import ImageView
from clipx.data.webdataset import WebDatasetSpec
from clipx.model.tokenizer import Tokenizer

SHARDS, EACH = 8, 6
BATCH, STEPS = 4, 24  # two epochs


def write_shards(folder: Path) -> None:
    for k in range(SHARDS):
        write_tar(folder / f"{k:05d}.tar", img2dataset(range(k * EACH, (k + 1) * EACH)))
    (folder / "sizes.json").write_text(json.dumps({f"{k:05d}.tar": EACH for k in range(SHARDS)}))


def spec_of(folder: str, **options: Any) -> WebDatasetSpec:
    shards = f"{folder}/{{00000..{SHARDS - 1:05d}}}.tar"
    defaults = {"held_out_share": 0.0, "retry_s": 600.0, "batch_size": BATCH, "shuffle_window": 12, "streams": 2}
    return WebDatasetSpec(name="far", shards=shards, **{**defaults, **options})


def batches(data: WebDatasetSpec, workers: int = 0) -> Iterator[Batch]:
    opened = data.open()
    return iter(
        train_loader(
            opened.train, training_order(data, opened, 3, ranks=1), ImageView(12, [0.5, 1.0], 10**6), Tokenizer(16),
            seed=3, samples=range(STEPS * BATCH), batch=BATCH, rank=0, world=1, workers=workers, prefetch=2, pin=False,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(local: Path) -> list[list[int]]:
    """Indices of the same data on the local disk, with the counts that a remote set finds."""
    return indices(batches(spec_of(str(local), read="stream", samples_per_shard=EACH)))


def indices(found: Iterator[Batch] | list[Batch]) -> list[list[int]]:
    return [batch.index.tolist() for batch in found]


def stored(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "shards").glob("*.tar"))


def test_streams_from_s3_equal_local_ones_and_each_shard_is_fetched_once(
    bucket: str, proxy: FaultyProxy, local: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    data = spec_of(bucket, cache_gb=1.0)
    found = list(batches(data, workers=2))
    assert indices(found) == expected
    assert not [bad for batch in found for bad in batch.bad]
    assert sorted(index for batch in found[: STEPS // 2] for index in batch.index.tolist()) == list(
        range(SHARDS * EACH)
    )
    assert proxy.requests <= 2 * SHARDS + 4  # a look-up and one range of each shard, although both epochs read it
    assert sum(batch.traffic.requests for batch in found) >= 2 * SHARDS
    size = sum(path.stat().st_size for path in local.glob("*.tar"))
    assert sum(batch.traffic.bytes for batch in found) >= size
    assert len(stored(tmp_path)) == SHARDS


def test_a_full_disk_costs_requests_but_no_sample(
    bucket: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("clipx.data.shards.cache.os.truncate", full)
    found = list(batches(spec_of(bucket)))
    assert indices(found) == expected
    assert not [bad for batch in found for bad in batch.bad]
    assert "No space left on device; reading it by ranges" in capfd.readouterr().err


def test_faults_of_the_storage_change_nothing_and_released_shards_are_removed(
    bucket: str, proxy: FaultyProxy, expected: list[list[int]], tmp_path: Path
) -> None:
    stream = batches(spec_of(bucket))
    found, most = [next(stream)], 0
    proxy.set("some", 3)
    for batch in stream:
        found.append(batch)
        most = max(most, len(stored(tmp_path)))
    assert indices(found) == expected
    assert not [bad for batch in found for bad in batch.bad]
    assert 2 <= most <= SHARDS - 1, "without a limit, released shards are removed"


def test_missing_truncated_and_shorter_shards_cost_only_their_places(
    own: str, endpoint: str, local: Path, tmp_path: Path
) -> None:
    fs = admin(endpoint)
    fs.rm_file(f"{own}/00001.tar")
    content = (local / "00002.tar").read_bytes()
    fs.pipe_file(f"{own}/00002.tar", content[: len(content) // 2])
    fs.put_file(str(write_tar(tmp_path / "short.tar", img2dataset(range(18, 22)))), f"{own}/00003.tar")
    found = list(batches(spec_of(own, max_bad_share=1.0)))
    bad = {(bad.key.rpartition("/")[2].partition(":")[0], bad.reason) for batch in found for bad in batch.bad}
    reasons = dict(bad)
    assert reasons.keys() == {"00001.tar", "00002.tar", "00003.tar"}
    assert reasons["00001.tar"] == "shard has 0 of the 6 samples that sizes.json lists; shard does not exist"
    assert reasons["00002.tar"].startswith("shard has 4 of the 6 samples that sizes.json lists; shard is cut off")
    assert reasons["00003.tar"] == "shard has 4 of the 6 samples that sizes.json lists"
    again = list(batches(spec_of(own, max_bad_share=1.0)))
    assert indices(again) == indices(found)
