"""Saving in the background: the state at the time of the call is saved, failures are reported, and updates wait for copies."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.runs import small
from helpers.savers import EventLog, LateCopies, load_tensors, make_writer, run_in_processes, steps, tensors
from safetensors.torch import load_file

from clipx.checkpoint import async_writer
from clipx.checkpoint.tensors import RankRows
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError
from clipx.trainer.trainer import Trainer


def test_every_dtype_and_shape_is_readable_by_safetensors(tmp_path: Path) -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    kinds = "float64 float16 bfloat16 int64 int16 int8 uint8 bool".split()
    given = {kind: x.to(getattr(torch, kind)) for kind in kinds}
    given |= {"0-dim": torch.tensor(3.5), "empty": torch.empty(0, 4), "transposed": x.transpose(0, 2)}
    given |= {"channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    given |= {"tied": x, "tied too": x, "a part": x[:, 1:2], "näme": torch.ones(3, requires_grad=True)}
    given |= {"large": torch.randn(3_000_001)}  # larger than a block
    run = make_writer(tmp_path)
    run.save(1, given, {})
    run.close()
    found = load_file(tmp_path / "step-00000001" / "tensors.safetensors")
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    run = make_writer(tmp_path)
    with pytest.raises(CheckpointError, match="a/z has dtype torch.complex64, which safetensors does not support"):
        run.save(1, {"a/z": torch.zeros(1, dtype=torch.complex64)}, {})
    run.close()


def _limit_file_size(bytes_: int) -> None:
    """Limits the size of files, like a full disk; needs no root."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, resource.RLIM_INFINITY))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_deletes_old_checkpoints_but_keeps_two(small_disk: Path) -> None:
    log = EventLog()
    run = make_writer(small_disk / "run", log, keep_last=9, max_failures=1)
    for step in range(1, 5):
        run.save(step, tensors(step, size=200_000), {}, keep=step == 1)  # 0.8 MB each
    run.save(5, tensors(5, size=400_000), {})
    run.wait()
    assert steps(small_disk / "run") == [5, 4, 3, 1], "only the oldest checkpoint without keep=True may be deleted"
    (failed,) = log.of("checkpoint_failed")
    assert failed["free_bytes"] < failed["needed_bytes"] and "No space left" in failed["message"]
    run.save(6, tensors(6, size=1_000_000), {})  # larger than the file system
    with pytest.raises(CheckpointError, match="No space left"):
        run.wait()
    run.close()
    assert steps(small_disk / "run") == [5, 4, 1]
    assert not list((small_disk / "run").glob("tmp.*"))
    for step in (5, 4, 1):
        assert load_tensors(small_disk / "run", step)["a/n"] == step


def _one_rank_fails(comm: Comm, path: Path) -> tuple[list[str], EventLog]:
    log, errors = EventLog(), []
    run = make_writer(path, log, comm, max_failures=2)

    def save(step: int) -> None:
        rows = torch.full((25_000, 1), float(step))
        run.save(step, {**tensors(step), "rows": RankRows(rows, 25_000 * comm.rank)}, {})

    def caught(call: object, *args: int) -> None:
        try:
            call(*args)  # type: ignore[operator]
        except CheckpointError as error:
            errors.append(str(error))

    for step, size in ((1, resource.RLIM_INFINITY), (2, 50_000), (3, resource.RLIM_INFINITY), (4, 50_000)):
        _limit_file_size(size if comm.rank == 1 else resource.RLIM_INFINITY)
        save(step)
        if step < 4:
            caught(run.wait)
    save(5)
    caught(save, 6)
    run.close()
    return errors, log


def test_a_failed_write_on_one_rank_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    (errors, log), (others, silent) = run_in_processes(2, tmp_path, _one_rank_fails, tmp_path / "run")
    assert errors == others
    assert "the last checkpoint could not be written (rank 1: [Errno 27] File too large" in errors[0]
    assert "checkpoint.max_failures=2 checkpoints in a row could not be written (rank 1: " in errors[1]
    assert not silent, "only rank 0 records events"
    assert [facts["step"] for facts in log.of("checkpoint_saved")] == [1, 3]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["step-00000001", "step-00000003"]
    assert load_tensors(tmp_path / "run")["rows"].eq(3).all() and len(load_tensors(tmp_path / "run")["rows"]) == 50_000


def test_a_save_holds_the_values_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that `until_update` names may change after `hold_updates`, all others at once."""
    monkeypatch.setattr(async_writer, "copies_from", lambda device: LateCopies())
    weight, buffer, rows = torch.ones(5), torch.ones(3), torch.ones(4, 2)
    run = make_writer(tmp_path)
    values = {"overdue": ["one"]}
    run.save(
        1, {"weight": weight, "buffer": buffer, "rows": RankRows(rows, 0)}, values, until_update={"weight", "rows"}
    )
    buffer.fill_(2)
    values["overdue"].append("two")
    run.hold_updates()
    weight.fill_(2)
    rows.fill_(2)
    run.wait()
    run.close()
    found = {name: x.unique().tolist() for name, x in load_tensors(tmp_path).items()}
    assert found == {"weight": [1], "buffer": [1], "rows": [1]}
    assert json.loads((tmp_path / "step-00000001" / "state.json").read_text())["state"] == {"overdue": ["one"]}


def test_a_step_changes_the_weights_only_after_they_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are made at the last possible moment: directly before the next step's update."""
    overrides = ("optimizer.ema_decay=0.9", "objective=fastclip_v1")  # with BatchNorm and per-sample state
    late = LateCopies()
    monkeypatch.setattr(async_writer, "copies_from", lambda device: late)
    trainer = Trainer(small(tmp_path / "run", "duration=2st", *overrides))
    steps = trainer.steps()
    next(steps)
    trainer.learner.settle()  # as before a save
    expected = {
        name: (value.tensor if isinstance(value, RankRows) else value).clone()
        for name, value in trainer.learner.state.capture().items()
    }
    trainer._save({})
    assert late.waiting > 100, "the weights and the optimizer's state are copied during the step"
    next(steps)
    assert late.waiting == 0, "the step must hold its update until the copies are made"
    trainer.run.checkpoints.wait()
    now = trainer.learner.state.capture()
    trainer.close()
    found = load_tensors(tmp_path / "run" / "checkpoints", 1)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    changed = {
        name.split("/")[0]
        for name, value in now.items()
        if not torch.equal(value.tensor if isinstance(value, RankRows) else value, expected[name])
    }
    assert {"model", "optimizer"} <= changed
