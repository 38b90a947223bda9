"""Malicious run directories: nothing in them is executed, and nothing outside them is read or written."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.payloads import Flag
from helpers.runs import VIT, compose, small

from clipx.checkpoint.downloader import fetch
from clipx.checkpoint.format import CheckpointDir, find_damage, sha256
from clipx.checkpoint.records import MANIFEST, STATE, TENSORS
from clipx.errors import CheckpointError, ClipxError, ConfigError
from clipx.evaluate import evaluate
from clipx.trainer.saved_run import open_run
from clipx.trainer.trainer import Trainer

SHARD = "shard.00000-of-00001.safetensors"
SECRET = "s3cr3t-of-the-victim-0123456789"
TINY = (
    *(*VIT, "model.text.width=8", "model.text.heads=1", "data.samples=64", "data.held_out_samples=8"),
    *("duration=2st", "schedule.warmup=0st"),
)


@pytest.fixture
def flag(tmp_path: Path) -> Flag:
    return Flag(tmp_path / "flag")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("done") / "run"
    Trainer(small(run_dir, *TINY)).fit()
    return run_dir


@pytest.fixture
def copies(done: Path, tmp_path: Path) -> Iterator[Path]:
    """Returns copies of the run to manipulate, without end: one that was loaded and found damaged is put aside."""
    return (Path(shutil.copytree(done, tmp_path / str(k) / "run")) for k in count())


@pytest.fixture
def malicious(copies: Iterator[Path]) -> Path:
    return next(copies)


def folder(run_dir: Path) -> Path:
    (found,) = (run_dir / "checkpoints").glob("step-*")
    return found


def sign(checkpoint: Path, *more: str) -> None:
    """Writes a manifest with valid hashes, as an attacker would."""
    names = [p.name for p in checkpoint.iterdir() if p.suffix == ".safetensors"]
    hashes = {name: sha256(checkpoint / name) for name in (*names, STATE, *more)}
    (checkpoint / MANIFEST).write_text(json.dumps(hashes))


def resumed(run_dir: Path) -> None:
    Trainer(small(run_dir, *TINY, f"resume={run_dir}")).close()


def resumed_from_url(run_dir: Path) -> None:
    Trainer(small(run_dir.with_name("new"), *TINY, f"resume=file://{run_dir}")).close()


def evaluated(run_dir: Path) -> None:
    evaluate(compose(f"run={run_dir}", "evaluator=[retrieval]", config_name="evaluate"))  # type: ignore[arg-type]


ENTRANCES = (resumed, resumed_from_url, evaluated)


# ------------------------------------------------------------------------------------------------------- pickles

PICKLES: dict[str, Callable[[Flag], bytes]] = {
    "pickle": Flag.pickled,
    "torch.save": Flag.saved,
    "old torch.save": Flag.saved_of_old,
    "npy": Flag.array,
}


def test_the_payloads_execute_when_unpickled(flag: Flag) -> None:
    assert flag.is_made_by(lambda: pickle.loads(flag.pickled()))
    assert flag.is_made_by(lambda: torch.load(io.BytesIO(flag.saved()), weights_only=False))


@pytest.mark.parametrize("name", [TENSORS, SHARD])
def test_a_pickle_in_place_of_tensors_is_rejected(copies: Iterator[Path], flag: Flag, name: str) -> None:
    for (kind, content), malicious in zip(PICKLES.items(), copies, strict=False):
        (folder(malicious) / name).write_bytes(content(flag))
        sign(folder(malicious))
        with pytest.raises(CheckpointError, match=f"{name} is not a safetensors file"):
            CheckpointDir(malicious / "checkpoints", print).load()
        assert flag.absent, kind


def test_a_pickle_is_rejected_by_resume_and_evaluate(copies: Iterator[Path], flag: Flag) -> None:
    for enter, malicious in zip(ENTRANCES, copies, strict=False):
        (folder(malicious) / TENSORS).write_bytes(flag.saved())
        sign(folder(malicious))
        with pytest.raises(CheckpointError, match=f"{TENSORS} is not a safetensors file"):
            enter(malicious)
        assert flag.absent, enter


@pytest.mark.parametrize("enter", ENTRANCES)
def test_files_of_other_formats_next_to_the_tensors_are_ignored(
    malicious: Path, flag: Flag, enter: Callable[[Path], None]
) -> None:
    names = ("model.pt", "optimizer.pkl", "rng.bin", ".metadata", "__0_0.distcp", "data.npy", "hook.py", "x.pth")
    for place in (malicious, folder(malicious)):
        for name in names:
            (place / name).write_bytes(flag.array() if name.endswith("npy") else flag.pickled())
    sign(folder(malicious), *(name for name in names if not name.startswith((".", "_"))))
    enter(malicious)
    assert flag.absent


# ------------------------------------------------------------------------------------------ values and configuration


def state_of(run_dir: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder(run_dir) / STATE).read_text())
    return state


def write_state(run_dir: Path, content: str) -> None:
    (folder(run_dir) / STATE).write_text(content)
    sign(folder(run_dir))


REDUCE = {"__reduce__": ["os.system", ["touch flag"]], "py/object/apply": "os.system", "_target_": "os.system"}


def test_a_malformed_state_is_rejected_in_one_line(copies: Iterator[Path]) -> None:
    message = r"\(step-00000002: state.json is not the state of a checkpoint \(.+\)\): restore one"
    documents = ("[" * 200_000, "[]", '{"state": []}', "\x80\x04")
    for content, malicious in zip(documents, copies, strict=False):
        write_state(malicious, content)
        with pytest.raises(CheckpointError, match=message):
            CheckpointDir(malicious / "checkpoints", print).load()


def test_the_configuration_in_a_checkpoint_is_never_evaluated(
    malicious: Path, flag: Flag, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VICTIM", SECRET)
    evil = {"_target_": "os.system", "command": f"touch {flag.path}", "name": "${oc.env:VICTIM}", **REDUCE}
    state = state_of(malicious)
    write_state(malicious, json.dumps({**state, "state": {**state["state"], "config": evil, "more": evil}}))
    resumed(malicious)
    evaluated(malicious)
    assert flag.absent
    assert not files_containing(malicious, SECRET)


def files_containing(place: Path, text: str) -> list[Path]:
    return [p for p in place.rglob("*") if p.is_file() and text.encode() in p.read_bytes()]


def config_with(run_dir: Path, **changes: Any) -> str:
    return yaml.safe_dump({**yaml.safe_load((run_dir / "config.yaml").read_text()), **changes})


CONFIGS: dict[str, tuple[Callable[[Path, Path], str], str]] = {
    "constructor": (
        lambda run_dir, flag: config_with(run_dir) + f"\nx: !!python/object/apply:os.system ['touch {flag}']\n",
        "could not determine a constructor",
    ),
    "target": (
        lambda run_dir, flag: config_with(run_dir, _target_="os.system", command=f"touch {flag}"),
        "(_target_|command) is not a key",
    ),
    "kind": (
        lambda run_dir, flag: config_with(run_dir, data={"kind": "os.system"}),
        "data.kind=os.system is not registered",
    ),
    "environment": (lambda run_dir, flag: config_with(run_dir, name="${oc.env:VICTIM}"), "found an interpolation"),
    "another resolver": (lambda run_dir, flag: config_with(run_dir, name="x${now:%Y}"), "found an interpolation"),
    "environment as a key": (lambda run_dir, flag: "'${oc.env:VICTIM}': 1\n", "found an interpolation"),
    "aliases": (
        lambda run_dir, flag: "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)),
        "found an alias",
    ),
    "nesting": (lambda run_dir, flag: "[" * 20_000, "cannot be read as a saved configuration: maximum recursion"),
    "a repeated kind": (lambda run_dir, flag: "data: {kind: shapes, kind: os.system}\n", "found a repeated key"),
    "another folder": (
        lambda run_dir, flag: config_with(
            run_dir, data={"kind": "shapes", "name": "../../x", "samples": 256, "batch_size": 32}
        ),
        "data.name=../../x is a path, and a name is one part of a path",
    ),
}


def test_the_constructor_executes_in_an_unsafe_yaml_loader(malicious: Path, flag: Flag) -> None:
    text = CONFIGS["constructor"][0](malicious, flag.path)
    assert flag.is_made_by(lambda: yaml.unsafe_load(text))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_with_executable_content_is_rejected(
    malicious: Path, flag: Flag, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VICTIM", SECRET)
    make, message = CONFIGS[name]
    (malicious / "config.yaml").write_bytes(make(malicious, flag.path).encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message) as raised:
        open_run(str(malicious))
    assert flag.absent
    assert SECRET not in str(raised.value) and "\n" not in str(raised.value)


def test_resume_rejects_a_configuration_with_executable_content(
    malicious: Path, flag: Flag, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VICTIM", SECRET)
    make, message = CONFIGS["constructor"]
    (malicious / "config.yaml").write_text(make(malicious, flag.path))
    for enter in (resumed, resumed_from_url):
        with pytest.raises(CheckpointError, match=message):
            enter(malicious)
    assert flag.absent


def test_a_configuration_cannot_make_timm_load_a_file(malicious: Path, flag: Flag) -> None:
    (malicious / "w.pth").write_bytes(flag.saved())
    values = yaml.safe_load((malicious / "config.yaml").read_text())
    values["model"]["image"]["options"]["checkpoint_path"] = f"{malicious}/w.pth"
    (malicious / "config.yaml").write_text(yaml.safe_dump(values))
    named = "model.image.options=.* checkpoint_path.* with which timm reads files: remove it"
    with pytest.raises(ConfigError, match=named):
        evaluated(malicious)
    assert flag.absent


# ----------------------------------------------------------------------------------------- files outside the folder


def test_a_manifest_that_names_a_file_outside_its_folder_is_rejected(malicious: Path, tmp_path: Path) -> None:
    manifest = json.loads((folder(malicious) / MANIFEST).read_text())
    for name in ("../x", "../../x.safetensors", "/etc/passwd", "a/../../x", ".hidden", "", "a\n", "a\\b"):
        (folder(malicious) / MANIFEST).write_text(json.dumps({**manifest, name: "0" * 64}))
        assert "which is not a file of the checkpoint" in str(find_damage(folder(malicious))), name
        with pytest.raises(CheckpointError, match="which is not a file of the checkpoint"):
            fetch(f"file://{folder(malicious)}", tmp_path / "a" / "b" / "checkpoints")
        assert not [p for p in (tmp_path / "a").rglob("*") if p.is_file()]


def test_a_link_to_a_file_outside_the_folder_is_rejected(malicious: Path, tmp_path: Path) -> None:
    path = folder(malicious) / STATE
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    assert find_damage(folder(malicious)) == f"{STATE} is not a regular file"
    with pytest.raises(CheckpointError, match="all checkpoints in .* are damaged"):
        resumed(malicious)


def test_a_malformed_manifest_is_a_damaged_checkpoint(malicious: Path, tmp_path: Path) -> None:
    for content in ("[" * 200_000, '{"tensors.safetensors": {}}', "\x00"):
        (folder(malicious) / MANIFEST).write_text(content)
        assert find_damage(folder(malicious)), content
        with pytest.raises(ClipxError, match="is damaged"):
            fetch(f"file://{folder(malicious)}", tmp_path / "fetched")
