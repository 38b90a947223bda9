"""Uploads are complete and verified despite all faults of the storage, and training never waits for them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from helpers.s3_server import FaultyProxy, admin
from helpers.uploads import UploadEvents, same_files, save, steps, upload
from helpers.waiting import wait_until

from clipx.checkpoint.downloader import fetch_newest
from clipx.checkpoint.records import MANIFEST, TENSORS
from clipx.checkpoint.retention import steps_to_keep
from clipx.checkpoint.uploader import Uploader
from clipx.storage.remote import StorageFolder


def test_a_partly_replaced_step_is_not_listed(run_dir: Path, local_url: str, tmp_path: Path) -> None:
    upload(run_dir, local_url, save(run_dir, 10), save(run_dir, 20))
    far, events = tmp_path / "far" / "checkpoints" / "step-00000020", UploadEvents()
    (far / TENSORS).unlink()
    (far / TENSORS).mkdir()  # no file can be written there
    with closing(Uploader(run_dir, local_url, events)) as uploader:
        uploader.submit(save(run_dir, 20, b"other"))
        events.wait_for("upload_failed")
        assert steps(local_url) == [10]
        (far / TENSORS).rmdir()
        assert uploader.finish(600)
    assert steps(local_url) == [20, 10]


def test_finish_uploads_the_final_versions_of_small_files(run_dir: Path, local_url: str, tmp_path: Path) -> None:
    with closing(Uploader(run_dir, local_url, UploadEvents())) as uploader:
        uploader.submit(save(run_dir, 10))
        wait_until(lambda: uploader.is_uploaded(run_dir / "checkpoints" / "step-00000010"))
        (run_dir / "metrics.jsonl").write_text("more\n")
        (run_dir / "report.html").write_text("the report")
        assert uploader.finish(600)
    assert (tmp_path / "far" / "metrics.jsonl").read_text() == "more\n"
    assert (tmp_path / "far" / "report.html").read_text() == "the report"


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_the_retention_policy_applies_at_the_url(run_dir: Path, url: str) -> None:
    with closing(
        Uploader(run_dir, url, UploadEvents(), keep=functools.partial(steps_to_keep, keep_last=2))
    ) as uploader:
        for step in (10, 20, 30, 40):
            folder = save(run_dir, step, shards=1, keep=step == 10)
            uploader.submit(folder)
            wait_until(functools.partial(uploader.is_uploaded, folder))
            shutil.rmtree(run_dir / "checkpoints")  # a lost machine must not delete remote checkpoints
        assert uploader.finish(600)
    assert steps(url) == [40, 30, 10]
    assert {name.split("/")[1] for name in StorageFolder(url).files("checkpoints")} == {
        f"step-000000{k}0" for k in (1, 3, 4)
    }


def set_age_of_25_hours(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (time.time() - 25 * 3600,) * 2)


def test_orphans_are_deleted_after_a_day(run_dir: Path, local_url: str, tmp_path: Path) -> None:
    upload(run_dir, local_url, save(run_dir, 10), save(run_dir, 20), save(run_dir, 30))
    far = tmp_path / "far" / "checkpoints"
    for step in (10, 20):
        (far / f"step-000000{step}" / MANIFEST).unlink()
    (far / "else").mkdir()
    for step in (10, 30):
        set_age_of_25_hours(far / f"step-000000{step}")
    shutil.rmtree(run_dir / "checkpoints")
    assert steps(local_url) == [30]
    upload(run_dir, local_url, save(run_dir, 40))
    assert sorted(path.name for path in far.iterdir()) == ["else", "step-00000020", "step-00000030", "step-00000040"]


def test_a_rewound_run_invalidates_later_uploads(run_dir: Path, local_url: str, tmp_path: Path) -> None:
    upload(run_dir, local_url, save(run_dir, 10), save(run_dir, 20), save(run_dir, 30))
    shutil.rmtree(run_dir / "checkpoints")
    events = upload(run_dir, local_url, save(run_dir, 15), rewound_to=10)
    assert sorted(events.of("remote_left")) == ["step-00000020", "step-00000030"]
    assert steps(local_url) == [15, 10]
    set_age_of_25_hours(tmp_path / "far" / "checkpoints" / "step-00000030")
    upload(run_dir, local_url, save(run_dir, 20, b"another future"))
    assert steps(local_url) == [20, 15, 10]
    assert (tmp_path / "far" / "checkpoints" / "step-00000030" / TENSORS).is_file(), (
        "it must not be treated as an orphan"
    )


def test_abandoned_multipart_uploads_are_aborted(
    run_dir: Path, own_bucket: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, fs = own_bucket.removeprefix("s3://"), admin(endpoint)

    def begin(key: str) -> None:
        made = fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        fs.call_s3("upload_part", Bucket=bucket, Key=key, PartNumber=1, UploadId=made["UploadId"], Body=b"part")

    def begun() -> list[str]:
        return sorted(found["Key"] for found in fs.list_multipart_uploads(bucket))

    for key in ("one/checkpoints/step-00000010/x", "one/checkpoints/step-00000020/x", "one2/checkpoints/y"):
        begin(key)
    upload(run_dir, f"{own_bucket}/one", save(run_dir, 10))
    assert begun() == ["one/checkpoints/step-00000020/x", "one2/checkpoints/y"], "the other upload may be in progress"
    monkeypatch.setattr("clipx.checkpoint.uploader._ORPHAN_S", -2.0)  # the server rounds the start up to a second
    upload(run_dir, f"{own_bucket}/one", save(run_dir, 30))
    assert begun() == ["one2/checkpoints/y"], "the upload of another run"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("mode", "amount"), [("down", 0), ("status", 400)])
def test_an_outage_only_delays_uploads(
    run_dir: Path, own_bucket: str, proxy: FaultyProxy, tmp_path: Path, mode: str, amount: int
) -> None:
    events = UploadEvents()
    with closing(Uploader(run_dir, own_bucket, events)) as uploader:
        uploader.submit(save(run_dir, 10))
        wait_until(lambda: uploader.is_uploaded(run_dir / "checkpoints" / "step-00000010"))
        events.clear()  # the first upload may have failed too, on a busy machine
        proxy.set(mode, amount)
        folder = save(run_dir, 20)
        start = time.monotonic()
        uploader.submit(folder)  # a call that waits for the storage would not return before the outage ends
        assert uploader.lag_s <= time.monotonic() - start
        events.wait_for("upload_failed")
        assert not uploader.is_uploaded(folder)
        time.sleep(0.5)
        assert uploader.lag_s > 0.5
        assert events.of("upload_failed") == ["step-00000020"], "more than one event for an outage"
        if amount == 400:
            (message,) = (event["message"] for event in events if event["event"] == "upload_failed")
            assert "ExpiredToken" in message and "correct or renew the credentials" in message
        proxy.set("up")
        assert uploader.finish(600)
        assert uploader.is_uploaded(folder)
    proxy.set("up")
    found = fetch_newest(own_bucket, tmp_path / "other", pytest.fail)
    assert found is not None and same_files(found, folder)


def test_an_upload_interrupted_within_a_file_is_restarted(
    run_dir: Path, own_bucket: str, proxy: FaultyProxy, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("clipx.storage.remote._PART", 5 << 20)
    folder, events = save(run_dir, 10, os.urandom(11 << 20), shards=0), UploadEvents()
    proxy.set("slow", 0.02)  # per 64 KiB
    with closing(Uploader(run_dir, own_bucket, events)) as uploader:
        wait_until(lambda: bool(admin(endpoint).list_multipart_uploads(own_bucket.removeprefix("s3://"))))
        proxy.set("down")
        events.wait_for("upload_failed")
        assert manifests_at(endpoint, own_bucket) == []
        proxy.set("up")
        assert uploader.finish(600)
    found = fetch_newest(own_bucket, tmp_path / "other", pytest.fail)
    assert found is not None and same_files(found, folder)
    assert not admin(endpoint).list_multipart_uploads(own_bucket.removeprefix("s3://")), "an unfinished upload remains"


def manifests_at(endpoint: str, bucket: str) -> list[str]:
    """Returns the manifests at a URL, bypassing the proxy."""
    return [path for path in admin(endpoint).find(bucket) if path.endswith(MANIFEST)]


class Disturbed(LocalFileSystem):  # type: ignore[misc]
    """A local file system that runs a callback after the first file is stored."""

    protocol = "disturbed"
    happen: Callable[[Path], object]

    def put_file(self, path1: str, path2: str, callback: Any = None, **kwargs: Any) -> None:
        super().put_file(path1, path2, callback, **kwargs)
        happen, Disturbed.happen = Disturbed.happen, lambda path: None
        happen(Path(path2))


@pytest.fixture
def disturbed(local_url: str) -> str:
    fsspec.register_implementation("disturbed", Disturbed, clobber=True)
    return local_url.replace("file://", "disturbed://")


def test_a_truncated_upload_is_repeated(run_dir: Path, local_url: str, disturbed: str, tmp_path: Path) -> None:
    Disturbed.happen = lambda path: os.truncate(path, 3)
    folder = save(run_dir, 10)
    events = upload(run_dir, disturbed)
    assert [(e["event"], "has 3 bytes at the URL" in e.get("message", "")) for e in events] == [
        ("upload_failed", True),
        ("uploaded", False),
    ]
    found = fetch_newest(local_url, tmp_path / "other", pytest.fail)
    assert found is not None and same_files(found, folder)


UPLOAD = """
import sys, time
from pathlib import Path
from clipx.checkpoint.uploader import Uploader
uploader = Uploader(Path(sys.argv[1]), sys.argv[2], lambda kind, **facts: print(kind, facts, flush=True))
time.sleep(1)
raise RuntimeError("by the training")
"""


def test_a_process_exits_immediately_during_an_outage(run_dir: Path, own_bucket: str, proxy: FaultyProxy) -> None:
    save(run_dir, 10, bytes(4 << 20))
    proxy.set("down")
    command = [sys.executable, "-c", UPLOAD, str(run_dir), own_bucket]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False
    )  # else it would wait for ever
    assert done.returncode == 1 and "by the training" in done.stderr
