"""Retention of checkpoints: the policy, and its use by a writer."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest
from helpers.savers import EventLog, load_tensors, make_writer, steps, tensors

from clipx.checkpoint import async_writer
from clipx.checkpoint.format import why_unusable
from clipx.checkpoint.records import CheckpointInfo, steps_to_keep

Info = CheckpointInfo
FIVE = [Info(1), Info(2, keep=True), Info(3, score=0.9), Info(4, score=0.5), Info(5)]
UPLOADED = [Info(1, uploaded=True), Info(2, keep=True, uploaded=True), Info(3, uploaded=False), Info(4, uploaded=True)]


@pytest.mark.parametrize(
    ("saved", "keep_last", "only_newest", "stay"),
    [
        ([], 3, False, set()),
        (FIVE, 1, False, {2, 3, 5}),
        (FIVE, 2, False, {2, 3, 4, 5}),
        ([Info(1, score=1.0), Info(2, score=1.0), Info(3)], 1, False, {2, 3}),  # of equal scores the newer
        ([Info(1, score=math.nan), Info(2, score=-1.0), Info(3, score=math.inf), Info(4)], 1, False, {2, 4}),
        (UPLOADED, 1, False, {2, 3, 4}),
        (UPLOADED, 1, True, {3, 4}),
        (FIVE, 1, True, {1, 2, 3, 4, 5}),  # nothing is uploaded
    ],
)
def test_steps_to_keep_follows_the_policy(
    saved: list[CheckpointInfo], keep_last: int, only_newest: bool, stay: set[int]
) -> None:
    assert steps_to_keep(saved, keep_last, only_newest) == stay


def test_checkpoints_are_not_deleted_before_their_upload(tmp_path: Path) -> None:
    there: set[str] = set()
    run = make_writer(tmp_path, keep_last=1, hooks={"is_uploaded": lambda folder: folder.name in there})
    for step in (1, 2, 3):
        run.save(step, tensors(step), {})
    run.wait()
    assert steps(tmp_path) == [3, 2, 1]
    there.add("step-00000001")
    run.prune()
    assert steps(tmp_path) == [3, 2]
    run.close()


def test_a_damaged_checkpoint_does_not_count_towards_keep_last(tmp_path: Path) -> None:
    """Verifies a checkpoint before older ones are deleted, not when they are needed."""
    first = make_writer(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        first.save(step, tensors(step), {})
    first.close()
    path = tmp_path / "step-00000003" / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    log = EventLog()
    second = make_writer(tmp_path, log, keep_last=2)
    second.save(4, tensors(4), {})
    second.close()
    assert steps(tmp_path) == [4, 2]
    assert (tmp_path / "step-00000003.corrupt").is_dir()
    assert "the hash of tensors.safetensors does not match" in log.of("checkpoint_damaged")[0]["message"]
    assert load_tensors(tmp_path, 2)["a/n"] == 2


@pytest.mark.parametrize("failing", ["find_damage", "read_regular"])
def test_a_checkpoint_that_the_disk_does_not_read_stays_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    first = make_writer(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        first.save(step, tensors(step), {})
    first.close()

    def unread(path: Path) -> object:
        if "step-00000003" in str(path):
            error = OSError(errno.EIO, "Input/output error", str(path))
            if failing == "read_regular":
                raise error
            return why_unusable(error)
        return actual(path)

    actual = getattr(async_writer, failing)
    monkeypatch.setattr(async_writer, failing, unread)
    log = EventLog()
    second = make_writer(tmp_path, log, keep_last=2)
    second.save(4, tensors(4), {})
    second.close()
    assert steps(tmp_path) == [4, 3, 2]
    assert "cannot be read: Input/output error" in log.of("checkpoint_damaged")[0]["message"]
