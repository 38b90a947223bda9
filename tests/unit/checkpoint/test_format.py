"""Checkpoints are complete or absent and verified before use: damaged, crafted and odd files give the one before."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.savers import make_writer, run_in_processes, tensors

from clipx.checkpoint.format import CheckpointDir, _verified, find_damage, sha256, write_file
from clipx.checkpoint.records import MANIFEST, STATE, TENSORS
from clipx.checkpoint.tensors import RankRows
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError

SHARD = "shard.00001-of-00001.safetensors"
FILES = (TENSORS, SHARD, STATE, MANIFEST)


class Messages(list[str]):
    def __call__(self, message: str) -> None:
        assert "\n" not in message
        self.append(message)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoints"
    run = make_writer(path)
    for step in (10, 20, 30):
        rows = RankRows(torch.full((4, 2), float(step)), 0)
        run.save(step, {**tensors(step), "rows": rows}, {"samples_seen": step}, keep=step == 20, score=step / 100)
    run.close()
    return path


@pytest.fixture
def told() -> Messages:
    return Messages()


@pytest.fixture
def folder(saved: Path, tmp_path: Path, told: Messages) -> CheckpointDir:
    return CheckpointDir(Path(shutil.copytree(saved, tmp_path / "checkpoints")), told)


@pytest.fixture
def newest(folder: CheckpointDir) -> Path:
    return folder.path / "step-00000030"


def test_the_newest_checkpoint_is_loaded(folder: CheckpointDir) -> None:
    found = folder.load()
    assert found is not None
    assert (found.step, found.state, found.keep, found.score) == (30, {"samples_seen": 30}, False, 0.3)
    assert set(found.tensors) == {"a/x", "a/n", "rows"} and len(found.tensors) == 3 and "a" not in found.tensors
    assert torch.equal(found.tensors["a/x"], torch.full((1000,), 30.0))
    assert found.tensors["a/n"].shape == () and found.tensors["rows"].tolist() == [[30, 30]] * 4
    assert found.sharded_names() == {"rows"}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit flipped": flip,
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "missing": Path.unlink,
}
CASES = [*((file, "a bit flipped") for file in FILES), (STATE, "missing"), (MANIFEST, "cut short")]


@pytest.mark.parametrize(("file", "damage"), CASES)
def test_a_damaged_checkpoint_is_reported_renamed_and_skipped(
    folder: CheckpointDir, newest: Path, told: Messages, file: str, damage: str
) -> None:
    DAMAGES[damage](newest / file)
    found = folder.load()
    assert found is not None
    assert found.step == 20 and found.tensors["a/x"].eq(20).all()
    (message,) = told
    assert f"{newest.name} is damaged (" in message
    assert file in message or file == MANIFEST
    assert newest.with_name(f"{newest.name}.corrupt").is_dir() and not newest.exists()


def test_only_damaged_checkpoints_are_an_error(folder: CheckpointDir) -> None:
    for path in folder.folders():
        flip(path / TENSORS)
    for _ in range(2):  # a later start begins no new run
        with pytest.raises(
            CheckpointError,
            match=r"all checkpoints in .* are damaged \(step-00000030: the hash of .* does not match\): restore one, or st",
        ):
            folder.load()


@pytest.mark.parametrize("failing", ["sha256", "safe_open"])
def test_a_checkpoint_that_the_disk_does_not_read_is_skipped_but_keeps_its_name(
    folder: CheckpointDir, newest: Path, told: Messages, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    module = "clipx.checkpoint.format" if failing == "sha256" else "clipx.checkpoint.tensors"
    read = getattr(sys.modules[module], failing)

    def refused(path: Path, *arguments: object) -> object:
        if newest in path.parents:
            error = OSError(errno.EIO, "Input/output error")  # as of `read`, without a path
            raise error if failing == "sha256" else OSError("Input/output error (os error 5)")
        return read(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.{failing}", refused)
        assert (found := folder.load()) is not None and found.step == 20
    assert f"{newest.name} is damaged (" in told[0] and "Input/output error" in told[0]
    assert (found := folder.load()) is not None and found.step == 30


def _load(comm: Comm, path: Path) -> tuple[int, list[str], float]:
    messages = Messages()
    found = CheckpointDir(path, messages).load_on_all(comm)
    assert found is not None
    return found.step, list(messages), found.tensors["a/x"][0].item()


def test_ranks_verify_together_and_load_the_same_checkpoint(
    folder: CheckpointDir, newest: Path, tmp_path: Path
) -> None:
    """One rank finds the damage."""
    flip(newest / SHARD)
    found = run_in_processes(3, tmp_path, _load, folder.path)
    assert [(step, value) for step, _, value in found] == [(20, 20.0)] * 3
    assert [len(messages) for _, messages, _ in found] == [1, 0, 0]


def test_a_file_has_the_contents_in_turn_and_their_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of `write` may write less than it is given."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: 1 << 20]))
    contents = [random.Random(size).randbytes(size) for size in (5, 0, (9 << 20) + 1)]
    digest = write_file(tmp_path / "file", [memoryview(content) for content in contents])
    assert (tmp_path / "file").read_bytes() == b"".join(contents)
    assert digest == hashlib.sha256(b"".join(contents)).hexdigest()


# ---------------------------------------------------------------------------------------------- crafted and odd files


def sign(checkpoint: Path) -> None:
    """Writes a manifest with valid hashes, as an attacker would."""
    hashes = {p.name: sha256(p) for p in checkpoint.iterdir() if p.name != MANIFEST}
    (checkpoint / MANIFEST).write_text(json.dumps(hashes))


def test_duplicate_keys_are_damage(folder: CheckpointDir, newest: Path) -> None:
    for file, key in ((MANIFEST, TENSORS), (STATE, "keep")):
        path = newest / file
        path.write_text(path.read_text().replace("{", f'{{"{key}": "0",', 1))
        if file == STATE:
            sign(newest)
        assert f"the key '{key}' occurs twice" in str(find_damage(newest))
        shutil.copytree(folder.path / "step-00000010", newest, dirs_exist_ok=True)


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "a named pipe": lambda path: os.mkfifo(path),
    "a link": lambda path: path.symlink_to("/etc/passwd"),
    "a link without target": lambda path: path.symlink_to("/nowhere"),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize(("file", "kind"), [*zip([MANIFEST, STATE, TENSORS, SHARD], ODD_FILES, strict=True)])
def test_another_kind_of_file_is_damage_on_every_rank_and_never_opened(
    folder: CheckpointDir, newest: Path, file: str, kind: str
) -> None:
    (newest / file).unlink()
    ODD_FILES[kind](newest / file)
    for rank in range(4):  # each hashes other files
        assert _verified(newest, rank, 4) == f"{file} is not a regular file"
    assert (found := folder.load()) is not None and found.step == 20


def test_a_huge_sparse_manifest_is_not_read(newest: Path) -> None:
    os.truncate(newest / MANIFEST, 1 << 27)
    assert find_damage(newest) == f"{MANIFEST} cannot be read: 134,217,728 bytes, more than 67,108,864"


def test_a_link_or_a_copy_under_the_name_of_another_step_is_damage(
    folder: CheckpointDir, newest: Path, told: Messages
) -> None:
    shutil.rmtree(newest)
    newest.symlink_to("step-00000010")
    shutil.rmtree(folder.path / "step-00000020")
    shutil.copytree(folder.path / "step-00000010", folder.path / "step-00000020")
    found = folder.load()
    assert found is not None and found.step == 10
    assert [message.count("(it is of step 10)") for message in told] == [1, 1]
    assert (folder.path / "step-00000030.corrupt").is_symlink()


def test_files_and_links_in_place_of_interrupted_saves_are_removed(folder: CheckpointDir, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (folder.path / "tmp.step-00000040.1").symlink_to(tmp_path / "outside")
    (folder.path / "tmp.step-00000050.old").mkdir()
    (folder.path / "step-00000060").write_text("file")
    assert (found := folder.load()) is not None and found.step == 30
    make_writer(folder.path).close()  # as a resumed run does
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
