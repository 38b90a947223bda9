"""Downloads equal the uploaded checkpoints or raise an error; invalid URLs are rejected."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.uploads import same_files, save, upload

from clipx.checkpoint.downloader import fetch, fetch_history, fetch_newest, remote_checkpoints
from clipx.checkpoint.format import find_damage
from clipx.checkpoint.records import MANIFEST, TENSORS
from clipx.errors import CheckpointError


def test_fetched_checkpoints_equal_the_saved_ones(run_dir: Path, local_url: str, tmp_path: Path) -> None:
    folders = [save(run_dir, 10), save(run_dir, 20, os.urandom(100_000))]
    events = upload(run_dir, local_url)
    assert events.of("uploaded") == ["step-00000020", "step-00000010"], "newest first"
    first = next(event for event in events if event["event"] == "uploaded")
    assert first["bytes"] == sum(p.stat().st_size for p in folders[1].iterdir() if p.name != MANIFEST)
    assert [step for step, _ in remote_checkpoints(local_url)] == [20, 10]
    other = tmp_path / "other"
    fetch_history(local_url, other)
    assert (other / "metrics.jsonl").read_text() == "of metrics.jsonl\n"
    found = fetch_newest(local_url, other / "checkpoints", pytest.fail)
    assert found == other / "checkpoints" / "step-00000020"
    assert same_files(found, folders[1]) and find_damage(found) is None
    assert same_files(fetch(remote_checkpoints(local_url)[1][1], other / "checkpoints"), folders[0])
    assert sorted(p.name for p in (other / "checkpoints").iterdir()) == ["step-00000010", "step-00000020"]


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
