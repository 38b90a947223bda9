"""Crafted and odd files in checkpoints: one error in one line, or the previous checkpoint, and never another result."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.nested import places, replaced
from helpers.savers import make_writer, tensors
from safetensors.numpy import save_file

from clipx.checkpoint.format import CheckpointDir, find_damage, sha256
from clipx.checkpoint.manager import CheckpointManager
from clipx.checkpoint.records import MANIFEST, STATE, TENSORS
from clipx.checkpoint.resume import Resume, is_checkpoint
from clipx.checkpoint.spec import CheckpointSpec
from clipx.checkpoint.tensors import RankRows
from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError, ClipxError, ConfigError

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
MUTANTS = ("null", "-1", "1e400", '"x"', "[]", "{}", "true", "NaN", "9" * 5000, "[" * 5000, r'"\ud800"')


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


@pytest.mark.parametrize("file", [STATE, MANIFEST])
@pytest.mark.filterwarnings("ignore")
def test_every_changed_value_is_the_same_state_or_damage(folder: CheckpointDir, file: str, caplog: Any) -> None:
    """Each value is replaced by each mutant: the newest checkpoint is used unchanged in its type, or the one before."""
    path = newest(folder) / file
    before = json.loads(path.read_text())
    fell_back = 0
    for place in places(before):
        for text in MUTANTS:
            path.write_text(json.dumps(replaced(before, place, "MUTANT")).replace('"MUTANT"', text))
            if file == STATE:
                sign(newest(folder))
            found = resumed(folder.path)
            if isinstance(found, str):
                assert (place, text) == (("state",), "{}") and "state.json has no best, data" in found
                continue
            step, state = found
            assert step in (10, 20)
            if step == 10:
                fell_back += 1
                (corrupt,) = folder.path.glob("*.corrupt")
                corrupt.rename(newest(folder))
            else:
                assert all(type(state[key]) is type(value) or key == "best" for key, value in RUN_STATE.items())
                assert state["best"] is None or math.isfinite(state["best"])
    assert fell_back > 40


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"keep": 1}, "keep is 1: Input should be a valid boolean"),
        ({"state": {**RUN_STATE, "best": float("nan")}}, "state.best is nan: Input should be a finite number"),
        ({"state": {**RUN_STATE, "non_finite": [0]}}, "state.non_finite.1: Field required"),
        ({"step": 10}, "it is of step 10"),
    ],
)
def test_a_value_of_another_type_is_reported_and_the_previous_checkpoint_used(
    folder: CheckpointDir, change: dict[str, Any], reason: str
) -> None:
    path = newest(folder) / STATE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    sign(newest(folder))
    found = folder.load()
    assert found is not None and found.step == 10
    assert isinstance(folder.report, Messages) and len(folder.report) == 1
    assert re.search(reason, folder.report[0])
    assert (folder.path / "step-00000020.corrupt").is_dir()


def test_a_missing_value_names_it_and_quarantines_nothing(folder: CheckpointDir) -> None:
    path = newest(folder) / STATE
    file = json.loads(path.read_text())
    del file["state"]["best"]
    path.write_text(json.dumps(file))
    sign(newest(folder))
    assert "state.json has no best: resume with the version of clipx that wrote it" in str(resumed(folder.path))
    assert newest(folder).is_dir()


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


@pytest.mark.parametrize("kind", ["a named pipe", "deep"])
def test_retention_quarantines_odd_states_of_old_checkpoints(folder: CheckpointDir, kind: str) -> None:
    """Retention reads the state of old checkpoints without verifying them."""
    path = folder.path / "step-00000010" / STATE
    path.unlink()
    ODD_FILES[kind](path) if kind in ODD_FILES else path.write_text("[" * 100_000)
    run = make_writer(folder.path, keep_last=1)
    run.save(30, tensors(30), {})
    run.wait()
    run.close()
    assert {p.name for p in folder.path.iterdir()} == {"step-00000030", "step-00000020", "step-00000010.corrupt"}


def test_a_huge_sparse_manifest_is_not_read(folder: CheckpointDir) -> None:
    os.truncate(newest(folder) / MANIFEST, 1 << 40)
    assert find_damage(newest(folder)) == f"{MANIFEST} cannot be read: 1,099,511,627,776 bytes, more than 67,108,864"


@pytest.mark.parametrize("earlier", [False, True], ids=["", "of an earlier version"])
def test_a_link_or_a_copy_under_the_name_of_another_step_is_damage(folder: CheckpointDir, earlier: bool) -> None:
    if earlier:
        path = folder.path / "step-00000010" / STATE
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "step"}))
        sign(folder.path / "step-00000010")
    shutil.rmtree(newest(folder))
    (folder.path / "step-00000030").symlink_to("step-00000010")
    if not earlier:
        shutil.copytree(folder.path / "step-00000010", newest(folder))
    found = folder.load()
    assert found is not None and found.step == 10
    assert isinstance(folder.report, Messages)
    assert [message.count("(it is of step 10)") for message in folder.report] == [1] * (2 - earlier)
    assert (folder.path / "step-00000030.corrupt").is_symlink()


def test_a_link_to_a_moved_checkpoint_is_used_and_its_target_not_removed(folder: CheckpointDir, tmp_path: Path) -> None:
    newest(folder).rename(tmp_path / "step-00000020")
    newest(folder).symlink_to(tmp_path / "step-00000020")
    found = folder.load()
    assert found is not None and found.step == 20
    folder.remove(newest(folder))
    assert not newest(folder).is_symlink() and (tmp_path / "step-00000020" / STATE).is_file()


def test_files_and_links_in_place_of_interrupted_saves_are_removed(folder: CheckpointDir, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (folder.path / "tmp.step-00000030.1").write_text("file")
    (folder.path / "tmp.step-00000040.1").symlink_to(tmp_path / "outside")
    (folder.path / "tmp.step-00000050.old").symlink_to("/nowhere")
    (folder.path / "tmp.step-x.old").mkdir()
    (folder.path / "step-00000060").write_text("file")
    assert resumed(folder.path) == (20, {**RUN_STATE})
    assert {p.name for p in folder.path.iterdir()} >= {"step-00000010", "step-00000020", "step-00000060.corrupt"}
    assert not list(folder.path.glob("tmp.*")) and (tmp_path / "outside" / "file").is_file()


@pytest.mark.parametrize("kind", ["a file", "a link to a disk that is not mounted"])
def test_a_folder_that_cannot_be_listed_is_an_error_and_not_a_new_run(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "checkpoints"
    path.touch() if kind == "a file" else path.symlink_to("/nowhere/checkpoints")
    with pytest.raises(
        CheckpointError,
        match=f"{re.escape(str(path))} cannot be listed .*: mount its disk, correct its permissions, or",
    ):
        CheckpointDir(path, pytest.fail).load()


def test_only_one_name_is_that_of_a_step_and_a_step_to_resume_is_a_plain_number() -> None:
    for name in ("step-٠٠٠٠٠٠٢٠", "step-000000020", "step-1", "step-" + "9" * 40, "step-00000020\n"):
        assert not is_checkpoint(name) and is_checkpoint("step-00000020") and is_checkpoint("step-100000000")
    for value in ("step:" + "9" * 400, "step:٣"):
        with pytest.raises(ConfigError, match="is not a step: give its number"):
            Resume.parse(value)


ROWS = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(("other", "start"), [(np.zeros((2, 3), np.float32), 4), (np.zeros((2, 2)), 4), (ROWS, 3)])
def test_parts_that_do_not_fit_together_are_damage(folder: CheckpointDir, other: Any, start: int) -> None:
    save_file(
        {"rows": other}, newest(folder) / "shard.00002-of-00002.safetensors", {"rows": json.dumps({"rows": start})}
    )
    sign(newest(folder))
    assert (found := folder.load()) is not None and found.step == 10
    assert (
        isinstance(folder.report, Messages)
        and "the parts of the tensor 'rows' in its files do not fit" in folder.report[0]
    )
