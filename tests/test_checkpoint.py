"""A checkpoint is whole or not there, and is verified before it is trusted."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from clipx import checkpoint as ckpt
from clipx.checkpoint import Checkpoint, CheckpointDir
from clipx.errors import CheckpointError


def checkpoint(step: int, size: int = 1000) -> Checkpoint:
    return Checkpoint(
        step, {"a/x": torch.full((size,), float(step)), "a/n": torch.tensor(step)}, {"samples_seen": step}
    )


class Told(list[str]):
    def __call__(self, message: str) -> None:
        self.append(message)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def folder(tmp_path: Path, told: Told) -> CheckpointDir:
    found = CheckpointDir(tmp_path / "checkpoints", told)
    for step in (10, 20, 30):
        found.save(checkpoint(step), keep_last=3)
    return found


def test_what_is_loaded_is_what_was_saved_last(folder: CheckpointDir) -> None:
    found = folder.load()
    assert found is not None
    assert found.step == 30
    assert found.state == {"samples_seen": 30}
    assert torch.equal(found.tensors["a/x"], torch.full((1000,), 30.0))
    assert found.tensors["a/n"].shape == ()


def test_a_named_step_is_loaded(folder: CheckpointDir) -> None:
    found = folder.load(20)
    assert found is not None
    assert found.step == 20


def test_a_step_that_is_not_there_is_refused_with_those_that_are(folder: CheckpointDir) -> None:
    with pytest.raises(CheckpointError, match=r"step-00000025 cannot be used: it is not there; there are 30, 20, 10"):
        folder.load(25)


def test_no_checkpoint_at_all_is_none(tmp_path: Path, told: Told) -> None:
    assert CheckpointDir(tmp_path / "none", told).load() is None


def test_old_ones_are_removed_when_a_newer_one_is_whole(folder: CheckpointDir) -> None:
    folder.save(checkpoint(40), keep_last=2)
    assert [p.name for p in folder.folders()] == ["step-00000040", "step-00000030"]


def test_saving_a_step_again_replaces_it(folder: CheckpointDir) -> None:
    folder.save(Checkpoint(30, {"a/x": torch.zeros(2)}, {"again": True}), keep_last=3)
    found = folder.load()
    assert found is not None
    assert found.state == {"again": True}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "bit flipped in tensors": lambda f: flip(f / "tensors.safetensors"),
    "bit flipped in state": lambda f: flip(f / "state.json"),
    "tensors cut short": lambda f: os.truncate(f / "tensors.safetensors", 100),
    "tensors missing": lambda f: (f / "tensors.safetensors").unlink(),
    "state missing": lambda f: (f / "state.json").unlink(),
    "manifest missing": lambda f: (f / "MANIFEST.json").unlink(),
    "manifest empty": lambda f: (f / "MANIFEST.json").write_text(""),
    "manifest of something else": lambda f: (f / "MANIFEST.json").write_text("[]"),
    "everything gone": lambda f: [p.unlink() for p in f.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_told_of_set_aside_and_passed_over(folder: CheckpointDir, told: Told, damage: str) -> None:
    newest = folder.folders()[0]
    DAMAGES[damage](newest)
    found = folder.load()
    assert found is not None
    assert found.step == 20
    assert len(told) == 1
    assert newest.name in told[0]
    assert newest.with_name(f"{newest.name}.corrupt").is_dir()
    assert not newest.exists()


def test_when_all_are_damaged_nothing_starts_afresh_in_silence(folder: CheckpointDir) -> None:
    for path in folder.folders():
        flip(path / "tensors.safetensors")
    with pytest.raises(CheckpointError, match="all checkpoints in .* are damaged"):
        folder.load()


@pytest.mark.parametrize("function", ["_sync", "_sha256"])
def test_a_process_that_dies_while_saving_leaves_the_last_one_good(tmp_path: Path, told: Told, function: str) -> None:
    """The process ends at once, as by kill -9, at each call of the save's own steps."""
    for call in range(2 if function == "_sha256" else 5):
        target = tmp_path / f"{function}-{call}"
        CheckpointDir(target, told).save(checkpoint(1), keep_last=3)
        process = multiprocessing.get_context("fork").Process(target=_die_at, args=(target, function, call))
        process.start()
        process.join(60)
        assert process.exitcode == 9
        found = CheckpointDir(target, told).load()
        assert found is not None
        whole = (target / "step-00000002").exists()
        assert found.step == (2 if whole else 1)
        CheckpointDir(target, told).save(checkpoint(3), keep_last=3)
        assert not list(target.glob("tmp.*")), "stumps are cleared by the next save"
    assert not told


def _die_at(target: Path, function: str, call: int) -> None:
    calls = iter(range(100))
    original = getattr(ckpt, function)

    def dying(path: Path) -> object:
        if next(calls) == call:
            os._exit(9)
        return original(path)

    setattr(ckpt, function, dying)
    CheckpointDir(target, print).save(checkpoint(2), keep_last=3)


def test_no_pickle_is_written(folder: CheckpointDir) -> None:
    assert {p.name for p in folder.folders()[0].iterdir()} == {"tensors.safetensors", "state.json", "MANIFEST.json"}
    assert json.loads((folder.folders()[0] / "state.json").read_text()) == {"samples_seen": 30}


def test_a_pickle_in_the_place_of_tensors_is_not_executed(folder: CheckpointDir, tmp_path: Path) -> None:
    import pickle

    class Payload:
        def __reduce__(self) -> object:
            return (Path.touch, (tmp_path / "executed",))

    newest = folder.folders()[0]
    (newest / "tensors.safetensors").write_bytes(pickle.dumps(Payload()))
    manifest = {name: ckpt._sha256(newest / name) for name in ("tensors.safetensors", "state.json")}
    (newest / "MANIFEST.json").write_text(json.dumps(manifest))  # an attacker's manifest matches
    with pytest.raises(Exception, match="(?i)header|safetensor"):
        folder.load()
    assert not (tmp_path / "executed").exists()


# -------------------------------------------------------------------------------------------- state by names


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(1, 3, 5, 5))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW([{"params": list(model.named_parameters()), "weight_decay": 0.1}], fused=True)
    for _ in range(3):
        model(torch.randn(4, 3, 5, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_an_optimizer_goes_on_as_if_it_had_not_stopped() -> None:
    model, optimizer = trained(0)
    other_model, other = trained(1)
    ckpt.load_module(other_model, {k: v.contiguous() for k, v in model.state_dict().items()}, "model")
    ckpt.load_optimizer(other, {k: v.contiguous() for k, v in ckpt.optimizer_tensors(optimizer).items()})
    x = torch.randn(4, 3, 5, 5)
    for m, o in ((model, optimizer), (other_model, other)):
        m(x).square().mean().backward()
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))
    state = other.state[next(other_model.parameters())]["exp_avg"]
    assert state.is_contiguous(memory_format=torch.channels_last), "in the parameter's own memory format"


def test_a_module_that_does_not_fit_is_refused_by_name() -> None:
    model, _ = trained(0)
    state = dict(model.state_dict())
    state["extra"] = state.pop("0.bias")
    state["0.weight"] = state["0.weight"][:2]
    with pytest.raises(CheckpointError, match=r"missing 0.bias; left over extra; other shape 0.weight \[2, 3, 3, 3\]"):
        ckpt.load_module(model, state, "model")


def test_an_optimizer_of_another_model_is_refused_by_name() -> None:
    _, optimizer = trained(0)
    state = ckpt.optimizer_tensors(optimizer)
    left_over = {**state, "foo/exp_avg": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="state for unknown foo"):
        ckpt.load_optimizer(optimizer, left_over)
    missing = {k: v for k, v in state.items() if not k.startswith("0.bias/")}
    with pytest.raises(CheckpointError, match=r"no state for 0.bias"):
        ckpt.load_optimizer(optimizer, missing)


def test_a_full_disk_is_an_error_and_leaves_the_last_one_good(folder: CheckpointDir, told: Told) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_save_with_little_room, args=(folder.path,))
    process.start()
    process.join(60)
    assert process.exitcode == 3
    found = folder.load()
    assert found is not None
    assert found.step == 30
    assert not told


def _save_with_little_room(path: Path) -> None:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        CheckpointDir(path, print).save(checkpoint(40, size=100_000), keep_last=3)
    except Exception:
        os._exit(3)
    os._exit(0)


def test_copies_of_a_run_do_not_share_checkpoints(folder: CheckpointDir, tmp_path: Path, told: Told) -> None:
    shutil.copytree(folder.path, tmp_path / "copy")
    CheckpointDir(tmp_path / "copy", told).save(checkpoint(50), keep_last=1)
    assert len(folder.folders()) == 3
