"""Crafted and odd files in checkpoints: one error in one line, or the previous checkpoint, and never another result."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.savers import make_writer, tensors

from clipx.checkpoint.format import CheckpointDir, find_damage, sha256
from clipx.checkpoint.manager import CheckpointManager
from clipx.checkpoint.records import MANIFEST, STATE, TENSORS
from clipx.checkpoint.resume import Resume
from clipx.checkpoint.spec import CheckpointSpec
from clipx.checkpoint.tensors import RankRows
from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError, ClipxError

SHARD = "shard.00001-of-00001.safetensors"
COMM = Comm(0, 1, 0, torch.device("cpu"))
RUN_STATE = {
    "samples_seen": 64,
    "epoch_samples": 64,
    "non_finite": [0, 0],
    "loss_scale": {"scale": 65536.0, "steps": 3, "skipped": 0},
    "overdue": ["retrieval"],
    "world": 1,
    "data": "fingerprint",
    "best": 0.5,
    "teacher": "digest",
    "config": {"name": "run", "data": {"kind": "shapes"}, "logger": {}},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoints"
    run = make_writer(path)
    for step in (10, 20):
        rows = RankRows(torch.full((4, 2), float(step)), 0)
        run.save(step, {**tensors(step), "rows": rows}, copy.deepcopy(RUN_STATE), score=step / 100)
    run.close()
    return path


class Messages(list[str]):
    def __call__(self, message: str) -> None:
        assert "\n" not in message
        self.append(message)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> CheckpointDir:
    return CheckpointDir(Path(shutil.copytree(saved, tmp_path / "checkpoints")), Messages())


def newest(folder: CheckpointDir) -> Path:
    return folder.path / "step-00000020"


def sign(checkpoint: Path) -> None:
    """Writes a manifest with valid hashes, as an attacker would."""
    hashes = {p.name: sha256(p) for p in checkpoint.iterdir() if p.name != MANIFEST}
    (checkpoint / MANIFEST).write_text(json.dumps(hashes))


def resumed(path: Path) -> tuple[int, dict[str, Any]] | str:
    """Returns step and state of the checkpoint from which a run resumes, or the error."""
    manager = CheckpointManager(path.parent, CheckpointSpec(), Length(64, 8, 640), COMM, lambda *_, **__: None)
    try:
        found = manager.find(Resume.parse("auto"))
    except ClipxError as error:
        message = str(error)
        if "\n" in message or len(message) > 1000:
            raise
        return message
    assert found is not None
    return found.step, found.state


def test_duplicate_keys_are_damage(folder: CheckpointDir) -> None:
    for file, key in ((MANIFEST, TENSORS), (STATE, "keep")):
        path = newest(folder) / file
        path.write_text(path.read_text().replace("{", f'{{"{key}": "0",', 1))
        if file == STATE:
            sign(newest(folder))
        assert f"the key '{key}' occurs twice" in str(find_damage(newest(folder)))
        shutil.copytree(folder.path / "step-00000010", newest(folder), dirs_exist_ok=True)


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "a named pipe": lambda path: os.mkfifo(path),
    "a link": lambda path: path.symlink_to("/etc/passwd"),
    "a link without target": lambda path: path.symlink_to("/nowhere"),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize(("file", "kind"), [*zip([MANIFEST, STATE, TENSORS, SHARD], ODD_FILES, strict=True)])
def test_another_kind_of_file_is_damage_on_every_rank_and_never_opened(
    folder: CheckpointDir, file: str, kind: str
) -> None:
    from clipx.checkpoint.format import _verified

    (newest(folder) / file).unlink()
    ODD_FILES[kind](newest(folder) / file)
    for rank in range(4):  # each hashes other files
        assert _verified(newest(folder), rank, 4) == f"{file} is not a regular file"
    assert (found := folder.load()) is not None and found.step == 10


def test_a_huge_sparse_manifest_is_not_read(folder: CheckpointDir) -> None:
    os.truncate(newest(folder) / MANIFEST, 1 << 40)
    assert find_damage(newest(folder)) == f"{MANIFEST} cannot be read: 1,099,511,627,776 bytes, more than 67,108,864"


def test_a_link_or_a_copy_under_the_name_of_another_step_is_damage(folder: CheckpointDir) -> None:
    shutil.rmtree(newest(folder))
    (folder.path / "step-00000030").symlink_to("step-00000010")
    shutil.copytree(folder.path / "step-00000010", newest(folder))
    found = folder.load()
    assert found is not None and found.step == 10
    assert isinstance(folder.report, Messages)
    assert [message.count("(it is of step 10)") for message in folder.report] == [1, 1]
    assert (folder.path / "step-00000030.corrupt").is_symlink()


def test_files_and_links_in_place_of_interrupted_saves_are_removed(folder: CheckpointDir, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (folder.path / "tmp.step-00000040.1").symlink_to(tmp_path / "outside")
    (folder.path / "tmp.step-00000050.old").mkdir()
    (folder.path / "step-00000060").write_text("file")
    assert resumed(folder.path) == (20, {**RUN_STATE})
    assert {p.name for p in folder.path.iterdir()} >= {"step-00000010", "step-00000020", "step-00000060.corrupt"}
    assert not list(folder.path.glob("tmp.*")) and (tmp_path / "outside" / "file").is_file()


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_a_new_run(tmp_path: Path) -> None:
    """A link to a disk that is not mounted."""
    path = tmp_path / "checkpoints"
    path.symlink_to("/nowhere/checkpoints")
    with pytest.raises(
        CheckpointError,
        match=f"{re.escape(str(path))} cannot be listed .*: mount its disk, correct its permissions, or",
    ):
        CheckpointDir(path, pytest.fail).load()
