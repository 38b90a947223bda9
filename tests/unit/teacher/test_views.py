"""Stored views of an ensemble of teachers: equal to the live teachers, their boxes, and bad samples."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.loading import train_batches
from helpers.runs import SMALL, VIT, compose, small

from clipx.data.augment_spec import AugmentSpec, ColorJitterSpec
from clipx.data.images import Draw, PixelReader
from clipx.data.order import Order
from clipx.data.source import BadSample
from clipx.data.spec import DataSpec
from clipx.data.transform import random_box
from clipx.distributed.comm import Comm
from clipx.extra.embed.command import embed
from clipx.precision.spec import Precision
from clipx.teacher.live import Teacher
from clipx.teacher.spec import TeacherSpec
from clipx.teacher.stored import StoredTeachers, boxes_file
from clipx.trainer.trainer import Trainer

ONE = Comm(0, 1, 0, torch.device("cpu"))
FP32 = Precision(torch.float32, None, "cpu")
SAMPLES, VIEWS, SCALE = 96, 3, [0.3, 1.0]
SHAPES = ("data=shapes", f"data.samples={SAMPLES}", "data.held_out_samples=16", "data.workers=0")
DATA = (*SHAPES, "data.crop_scale=[0.3,1.0]")
RUN = (*SMALL, *VIT, *DATA, "schedule.warmup=1st", "objective=distillation", "model.embed_dim=48")
# The second teacher has another width, image size and context length.
TEACHERS = {"a": (), "b": ("seed=1", "model.embed_dim=24", "model.image.size=32", "model.text.context_length=12")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    for name, options in TEACHERS.items():
        Trainer(small(folder / name, *VIT, *DATA, "duration=2st", "schedule.warmup=1st", *options)).fit()
    return {name: folder / name for name in TEACHERS}


def embedded(teacher: Path, out: Path, *overrides: str) -> Path:
    options = (f"run={teacher}", f"out={out}", *DATA, f"views={VIEWS}", "samples_per_shard=40", *overrides)
    embed(compose(*options, config_name="embed"))
    return out


@pytest.fixture(scope="module")
def stored(trained: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("views")
    sizes = {"a": "samples_per_shard=40", "b": "samples_per_shard=32"}
    return {name: embedded(trained[name], folder / name, sizes[name]) for name in trained}


def data() -> DataSpec:
    return compose(*SMALL, *DATA).data


def opened(*folders: Path, overrides: tuple[str, ...] = ()) -> StoredTeachers:
    options = compose(*SMALL, *DATA, *overrides).data.view_options()
    return StoredTeachers.open([str(path) for path in folders], [None] * len(folders), data().open().train, options)


def check_equal_to_the_live_teacher(teacher: Path, targets: StoredTeachers, images: PixelReader) -> None:
    """The live teacher embeds the crops and captions of the batch."""
    live = Teacher.build(TeacherSpec(weights=str(teacher)), ONE, FP32, 1)
    train = data().open().train
    tokenizer = compose(*RUN, "teacher.weights=x").model.text.build_tokenizer()
    order, images = Order(train.sizes, 0, 100), images.and_for(live.size)
    loader = train_batches(train, order, images, tokenizer, range(2 * SAMPLES), 48, teacher=live.texts, targets=targets)
    for batch in loader:
        image, text, live_image, live_text = live(batch).targets
        torch.testing.assert_close(image / live.scale, live_image / live.scale, rtol=0, atol=1e-6)
        torch.testing.assert_close(text, live_text, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [32, 48])
def test_stored_views_equal_the_live_teacher_on_the_same_crops(
    trained: dict[str, Path], stored: dict[str, Path], size: int
) -> None:
    """`size`: of the student's images."""
    check_equal_to_the_live_teacher(trained["a"], opened(stored["a"]), PixelReader((size,), SCALE, 10**6))


def test_stored_views_equal_the_live_teacher_on_the_same_augmentation(trained: dict[str, Path], tmp_path: Path) -> None:
    """The augmentation of a view is drawn again in training, from the seed, the sample and the number of the view."""
    augmentation = ("data.augment.flip=0.5", "data.augment.erase=0.5", "data.augment.color_jitter.probability=1")
    words = ("data.crop_ratio=[1,1]", *augmentation)
    augment = AugmentSpec(flip=0.5, erase=0.5, color_jitter=ColorJitterSpec(probability=1))
    view = PixelReader((48,), SCALE, 10**6, crop_ratio=[1.0, 1.0], augmentation=augment)
    targets = opened(embedded(trained["a"], tmp_path / "a", *words), overrides=words)
    check_equal_to_the_live_teacher(trained["a"], targets, view)


def test_boxes_are_those_of_the_seed_the_sample_and_the_view(stored: dict[str, Path]) -> None:
    boxes = np.concatenate([np.load(stored["a"] / boxes_file(number)) for number in range(3)])
    other = np.concatenate([np.load(stored["b"] / boxes_file(number)) for number in range(3)])
    assert boxes.dtype == np.int32 and boxes.shape == (SAMPLES, VIEWS, 4)
    assert np.array_equal(boxes, other), "they do not depend on the teacher, its image size or the size of its shards"
    side = boxes[..., 2:].max().item()
    for index, view in ((0, 0), (7, 2), (95, 1)):
        box = random_box((side, side), SCALE, random.Random(f"0/{index}/{view}"))
        assert tuple(boxes[index, view].tolist()) == box


def test_teachers_with_different_boxes_are_a_bad_sample(stored: dict[str, Path], tmp_path: Path) -> None:
    other = shutil.copytree(stored["b"], tmp_path / "b")
    boxes = np.load(other / boxes_file(0))
    boxes[3] += 1
    np.save(other / boxes_file(0), boxes)
    with pytest.raises(BadSample, match="have different crops: write one of them again"):
        opened(stored["a"], other).draw(3, Draw(random.Random(0), ""))
