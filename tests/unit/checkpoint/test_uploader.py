"""Uploads are complete and verified despite all faults of the storage, and training never waits for them."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from helpers.uploads import UploadEvents, same_files, save, steps, upload
from helpers.waiting import wait_until

from clipx.checkpoint.downloader import fetch_newest
from clipx.checkpoint.records import MANIFEST, TENSORS, steps_to_keep
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


def test_the_retention_policy_applies_at_the_url(run_dir: Path, local_url: str) -> None:
    with closing(
        Uploader(run_dir, local_url, UploadEvents(), keep=functools.partial(steps_to_keep, keep_last=2))
    ) as uploader:
        for step in (10, 20, 30, 40):
            folder = save(run_dir, step, shards=1, keep=step == 10)
            uploader.submit(folder)
            wait_until(functools.partial(uploader.is_uploaded, folder))
            shutil.rmtree(run_dir / "checkpoints")  # a lost machine must not delete remote checkpoints
        assert uploader.finish(600)
    assert steps(local_url) == [40, 30, 10]
    assert {name.split("/")[1] for name in StorageFolder(local_url).files("checkpoints")} == {
        f"step-000000{k}0" for k in (1, 3, 4)
    }


def set_age_of_25_hours(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (time.time() - 25 * 3600,) * 2)


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
