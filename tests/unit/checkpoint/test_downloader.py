"""Downloads equal the uploaded checkpoints or raise an error; invalid URLs are rejected."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from helpers.s3_server import FaultyProxy, admin
from helpers.uploads import same_files, save, upload

from clipx.checkpoint.downloader import check_writable, fetch, fetch_history, fetch_newest, remote_checkpoints
from clipx.checkpoint.format import find_damage
from clipx.checkpoint.records import MANIFEST, TENSORS
from clipx.errors import CheckpointError, ConfigError, StorageError
from clipx.storage.remote import StorageFolder


def test_fetched_checkpoints_equal_the_saved_ones(run_dir: Path, url: str, tmp_path: Path) -> None:
    folders = [save(run_dir, 10), save(run_dir, 20, os.urandom(100_000))]
    events = upload(run_dir, url)
    assert events.of("uploaded") == ["step-00000020", "step-00000010"], "newest first"
    first = next(event for event in events if event["event"] == "uploaded")
    assert first["bytes"] == sum(p.stat().st_size for p in folders[1].iterdir() if p.name != MANIFEST)
    assert [step for step, _ in remote_checkpoints(url)] == [20, 10]
    other = tmp_path / "other"
    fetch_history(url, other)
    assert (other / "metrics.jsonl").read_text() == "of metrics.jsonl\n"
    found = fetch_newest(url, other / "checkpoints", pytest.fail)
    assert found == other / "checkpoints" / "step-00000020"
    assert same_files(found, folders[1]) and find_damage(found) is None
    assert same_files(fetch(remote_checkpoints(url)[1][1], other / "checkpoints"), folders[0])
    assert sorted(p.name for p in (other / "checkpoints").iterdir()) == ["step-00000010", "step-00000020"]


def test_a_large_file_is_sent_in_parts_and_read_in_blocks(
    run_dir: Path, own_bucket: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipx.storage.remote._PART", 5 << 20)
    monkeypatch.setattr("clipx.storage.remote.BLOCK", 3 << 20)
    folder = save(run_dir, 10, os.urandom(12 << 20), shards=1)
    upload(run_dir, own_bucket)
    tag = admin(endpoint).info(f"{own_bucket}/checkpoints/step-00000010/{TENSORS}")["ETag"]
    assert tag.strip('"').endswith("-3"), "uploaded in three parts"
    found = fetch_newest(own_bucket, tmp_path / "other", pytest.fail)
    assert found is not None and same_files(found, folder)


def test_local_checkpoints_are_not_fetched_again(run_dir: Path, local_url: str) -> None:
    folder = save(run_dir, 10)
    upload(run_dir, local_url)
    assert fetch_newest(local_url, folder.parent, pytest.fail, after=10) is None
    with pytest.raises(CheckpointError, match="step-00000010 already exists"):
        fetch(f"{local_url}/checkpoints/step-00000010", folder.parent)
    (run_dir / "metrics.jsonl").write_text("newer than the upload\n")
    fetch_history(local_url, run_dir)
    assert (run_dir / "metrics.jsonl").read_text() == "newer than the upload\n"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def _name(name: str, path: Path) -> None:
    manifest = json.loads((path.parent / MANIFEST).read_text())
    (path.parent / MANIFEST).write_text(json.dumps({**manifest, name: "0" * 64}))


DAMAGE: dict[str, Callable[[Path], object]] = {
    f"the hash of {TENSORS} does not match": _flip,
    f"{MANIFEST} names '../../stolen', which is not a file of the checkpoint": functools.partial(_name, "../../stolen"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_checkpoint_is_reported_and_skipped(
    run_dir: Path, local_url: str, tmp_path: Path, fault: str
) -> None:
    upload(run_dir, local_url, save(run_dir, 10), save(run_dir, 20))
    far, into, told = tmp_path / "far" / "checkpoints", tmp_path / "a" / "b" / "checkpoints", list[str]()
    DAMAGE[fault](far / "step-00000020" / TENSORS)
    assert fetch_newest(local_url, into, told.append) == into / "step-00000010"
    (line,) = told
    assert f"checkpoint {local_url}/checkpoints/step-00000020 is damaged: {fault}" in line
    assert line.endswith(": falling back to the previous checkpoint")
    assert [path.name for path in into.iterdir()] == ["step-00000010"]
    assert not list(tmp_path.rglob("stolen"))
    DAMAGE[fault](far / "step-00000010" / TENSORS)
    with pytest.raises(CheckpointError, match=r"^all checkpoints at .* are damaged \(.*\): restore one, or start"):
        fetch_newest(local_url, tmp_path / "c", told.append)
    assert fetch_newest(local_url, tmp_path / "c", told.append, after=5) is None, (
        "a local checkpoint of step 5 is available"
    )


def test_a_fetch_survives_a_short_outage(run_dir: Path, own_bucket: str, proxy: FaultyProxy, tmp_path: Path) -> None:
    folder = save(run_dir, 10, os.urandom(200_000))
    upload(run_dir, own_bucket)
    proxy.set("down")

    def recover() -> None:
        time.sleep(1.5)
        proxy.set("cut", 150_000)
        time.sleep(1.5)
        proxy.set("some", 3)

    threading.Thread(target=recover).start()
    found = fetch_newest(own_bucket, tmp_path / "other", pytest.fail, retry_s=120)
    assert found is not None and same_files(found, folder)


def test_an_unwritable_url_is_rejected_before_training(url: str, own_bucket: str, tmp_path: Path) -> None:
    check_writable(url)
    assert StorageFolder(url).files() == {}
    (tmp_path / "plain").write_text("")
    for wrong in (f"{own_bucket}-none/runs", "nonsense://x/y", f"file://{tmp_path}/plain/x"):
        with pytest.raises(ConfigError, match=f"^checkpoint.remote={wrong} cannot be written"):
            check_writable(wrong, retry_s=3)


def test_no_error_shows_a_password(own_bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint.replace("http://", "http://user:SECRET@"))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    proxy.set("down")
    with pytest.raises((StorageError, CheckpointError)) as raised:
        remote_checkpoints(own_bucket, retry_s=0)
    assert "SECRET" not in str(raised.value)
