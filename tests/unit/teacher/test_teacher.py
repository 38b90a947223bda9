"""Teachers: live models and stored embeddings give equal training; resuming; damaged embeddings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.loading import batch_of
from helpers.runs import SMALL, VIT, compose, losses, small, tensors, untimed_rows

from clipx.data.batch import Batch
from clipx.data.source import BadSample, Source
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError, ClipxError
from clipx.extra.embed.command import embed
from clipx.model.tokenizer import Tokenizer
from clipx.precision.spec import Precision
from clipx.teacher.live import Teacher
from clipx.teacher.spec import TeacherSpec
from clipx.teacher.stored import StoredTeachers, npy_files
from clipx.trainer.trainer import Trainer

ONE = Comm(0, 1, 0, torch.device("cpu"))
FP64 = Precision(torch.float64, None, "cpu")
DATA = ("data.samples=96", "data.held_out_samples=16", "duration=3st", "schedule.warmup=1st")
PLAIN = ("data.crop_scale=[1.0,1.0]",)  # crops the whole of square images, like the evaluation view


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("teacher") / "run"
    Trainer(small(run_dir, *VIT, *DATA)).fit()
    return run_dir


@pytest.fixture(scope="module")
def stored(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stored") / "embeddings"
    embed(compose(f"run={trained}", f"out={out}", "samples_per_shard=40", config_name="embed"))
    return out


def distillation_trainer(run_dir: Path, *overrides: str) -> Trainer:
    return Trainer(small(run_dir, *VIT, *DATA, "objective=distillation", *overrides))


def training_rows(run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    distillation_trainer(run_dir, *overrides).fit()
    return untimed_rows(run_dir)


def batch(size: int = 48, samples: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (samples, 3, size, size), generator=generator, dtype=torch.uint8)
    texts = [f"a red circle, number {i}" for i in range(samples)]
    return batch_of(image, Tokenizer(12)(texts), torch.arange(samples), second=Tokenizer(20)(texts))


def test_a_teacher_returns_its_embeddings_times_its_scale(trained: Path) -> None:
    teacher = Teacher.build(TeacherSpec(weights=str(trained)), ONE, FP64, 3)
    taught = teacher(batch())
    image, text = taught.targets
    scale = tensors(trained, 3)["objective/temperature.log_scale"].exp()
    assert teacher.scale == pytest.approx(scale.item(), rel=1e-6)
    torch.testing.assert_close(image.norm(dim=1), torch.full((8,), teacher.scale, dtype=torch.float64))
    with torch.no_grad():
        torch.testing.assert_close(
            image / teacher.scale, teacher.model.encode_image(taught.image.rows[0]), rtol=0, atol=1e-12
        )
        torch.testing.assert_close(text, teacher.model.encode_text(taught.text.rows[1]), rtol=0, atol=1e-12)
    assert not image.requires_grad and not teacher.model.training


def test_a_run_resumes_only_with_the_same_teacher(trained: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "moved" / "teacher"
    shutil.copytree(trained, teacher)
    whole = training_rows(tmp_path / "run", f"teacher.weights={teacher}", "checkpoint.every=1st")
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run", again)
    found = distillation_trainer(again, f"teacher.weights={trained}", "checkpoint.every=1st", "resume=step:1")
    assert f"teacher.weights: {teacher} -> {trained}" in found.run.facts["changed"]
    found.fit()
    assert losses(again)[-2:] == [row["train/loss"] for row in whole[1:]]

    message = r"teacher\.weights=.* is not the teacher of .* \(digest \w{16}, in the checkpoint \w{16}\)"
    with pytest.raises(CheckpointError, match=message):
        distillation_trainer(again, f"teacher.weights={tmp_path}/run", "resume=step:1")
    with pytest.raises(CheckpointError, match=r"teacher\.temperature: None -> 0\.5"):
        distillation_trainer(again, f"teacher.weights={trained}", "teacher.temperature=0.5", "resume=step:1")


@pytest.mark.parametrize("objective", ["distillation", "drrho_clip"])
def test_stored_embeddings_equal_the_live_teacher_for_equal_views(
    trained: Path, stored: Path, objective: str, tmp_path: Path
) -> None:
    """Compares the logged losses of two steps: embeddings in float64 to 1e-9, in float32 to a relative 1e-6.

    Each step draws another caption. drrho_clip has no use for the temperature of the teacher.
    """
    rho = ("objective.rho=2",) if objective == "drrho_clip" else ()
    options = (f"objective={objective}", *rho, *PLAIN, "duration=2st", "model.embed_dim=48", "precision=fp64")
    wide = tmp_path / "wide"
    embed(compose(f"run={trained}", f"out={wide}", "dtype=float64", "precision=fp64", config_name="embed"))
    live = training_rows(tmp_path / "live", *options, f"teacher.weights={trained}")
    found = training_rows(tmp_path / "wide.run", *options, f"teacher.embeddings={wide}")
    names = [name for name in live[0] if "loss" in name]
    assert len(found) == 2 and found[0].keys() == live[0].keys()
    assert len(names) == (1 if rho else 3)
    for one, expected in zip(found, live, strict=True):
        assert [one[name] for name in names] == pytest.approx([expected[name] for name in names], abs=1e-9, rel=0)
    if objective == "distillation":
        rounded = training_rows(tmp_path / "rounded", *options, f"teacher.embeddings={stored}")
        for one, expected in zip(rounded, live, strict=True):
            assert [one[name] for name in names] == pytest.approx([expected[name] for name in names], abs=0, rel=1e-6)


def open_stored(stored: Path, temperature: float | None = None) -> tuple[StoredTeachers, Source]:
    train = compose(*SMALL, *DATA).data.open().train
    return StoredTeachers.open([str(stored)], [temperature], train, {"crop_scale": [0.9, 1.0]}), train


def test_a_row_belongs_to_its_sample_and_caption(stored: Path) -> None:
    found, train = open_stored(stored, temperature=0.02)
    assert found.teachers[0].scale == 50
    for index in (0, 39, 40, 95):
        number, row = divmod(index, 40)
        image, text, _, offsets = (np.load(stored / name) for name in npy_files(number))
        for place, caption in enumerate(train.read(index).captions):
            image_T, text_T = found.rows(index, train.read(index), caption)
            torch.testing.assert_close(image_T, 50 * torch.tensor(image[row]))
            same = [k for k, other in enumerate(train.read(index).captions) if other == caption]
            torch.testing.assert_close(text_T, torch.tensor(text[offsets[row] + same[0]]))
            assert place in same
    with pytest.raises(BadSample, match="lacks the caption"):
        found.rows(0, train.read(0), "a caption that it never had")


def damaged_copy(stored: Path, folder: Path, how: str) -> Path:
    shutil.copytree(stored, folder)
    manifest = folder / "manifest.json"
    values = json.loads(manifest.read_text())
    if how == "unfinished":
        manifest.unlink()
    elif how == "cut":
        with (folder / npy_files(2)[0]).open("r+b") as file:
            file.truncate(200)
    else:
        manifest.write_text(json.dumps({**values, **json.loads(how)}))
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unfinished", "is incomplete: run its python -m clipx.embed command again"),
        ("cut", "00002.image.npy has 200 bytes, not "),
        ('{"data": "0123"}', "is of other data (fingerprint 0123, 96 samples) than this run's training data ("),
        ('{"width": 1e400}', "manifest.json cannot be read (width is inf: "),
    ],
)  # fmt: skip
def test_mismatched_or_damaged_stored_embeddings_raise_an_error(
    stored: Path, tmp_path: Path, how: str, message: str
) -> None:
    folder = damaged_copy(stored, tmp_path / "copy", how)
    with pytest.raises(ClipxError) as caught:
        open_stored(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)
