"""Checkpoints are complete or absent, and are verified before they are used."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.savers import make_writer, run_in_processes, tensors

from clipx.checkpoint.format import CheckpointDir, write_file
from clipx.checkpoint.tensors import RankRows
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError

FILES = ("tensors.safetensors", "shard.00001-of-00001.safetensors", "state.json", "MANIFEST.json")


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointDir:
    run = make_writer(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        rows = RankRows(torch.full((4, 2), float(step)), 0)
        run.save(step, {**tensors(step), "rows": rows}, {"samples_seen": step}, keep=step == 20, score=step / 100)
    run.close()
    return CheckpointDir(tmp_path / "checkpoints", Messages())


class Messages(list[str]):
    def __call__(self, message: str) -> None:
        self.append(message)


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
CASES = [*((file, "a bit flipped") for file in FILES), ("state.json", "missing"), ("MANIFEST.json", "cut short")]


@pytest.mark.parametrize(("file", "damage"), CASES)
def test_a_damaged_checkpoint_is_reported_renamed_and_skipped(folder: CheckpointDir, file: str, damage: str) -> None:
    newest = folder.folders()[0]
    DAMAGES[damage](newest / file)
    found = folder.load()
    assert found is not None
    assert found.step == 20 and found.tensors["a/x"].eq(20).all()
    assert isinstance(folder.report, Messages)
    (messages,) = folder.report
    assert f"{newest.name} is damaged (" in messages
    assert file in messages or file == "MANIFEST.json"
    assert newest.with_name(f"{newest.name}.corrupt").is_dir() and not newest.exists()


def test_only_damaged_checkpoints_are_an_error(folder: CheckpointDir) -> None:
    for path in folder.folders():
        flip(path / "tensors.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"all checkpoints in .* are damaged \(step-00000030: the hash of .* does not match\): restore one, or start",
    ):
        folder.load()


def _load(comm: Comm, path: Path) -> tuple[int, list[str], float]:
    messages = Messages()
    found = CheckpointDir(path, messages).load_on_all(comm)
    assert found is not None
    return found.step, list(messages), found.tensors["a/x"][0].item()


def test_ranks_verify_together_and_load_the_same_checkpoint(folder: CheckpointDir, tmp_path: Path) -> None:
    """One rank finds the damage."""
    flip(folder.folders()[0] / FILES[1])
    found = run_in_processes(3, tmp_path, _load, folder.path)
    assert [(step, value) for step, _, value in found] == [(20, 20.0)] * 3
    assert [len(messages) for _, messages, _ in found] == [1, 0, 0]


@pytest.mark.parametrize(("sizes", "most"), [((), 1 << 30), ((8, 0, 3), 2), ((5, (9 << 20) + 1), 1 << 20)])
def test_a_file_has_the_contents_in_turn_and_their_hash(
    sizes: tuple[int, ...], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of `write` may write less than it is given."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:most]))
    contents = [random.Random(size).randbytes(size) for size in sizes]
    digest = write_file(tmp_path / "file", [memoryview(content) for content in contents])
    assert (tmp_path / "file").read_bytes() == b"".join(contents)
    assert digest == hashlib.sha256(b"".join(contents)).hexdigest()
