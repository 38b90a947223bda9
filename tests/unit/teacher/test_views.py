"""Stored views of an ensemble of teachers: equal to the live teachers, drawn by position, and bad samples."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.runs import SMALL, VIT, compose, small

from clipx.data.augment_spec import AugmentSpec, ColorJitterSpec
from clipx.data.batch import Batch
from clipx.data.loader import SecondView, train_loader
from clipx.data.order import Order
from clipx.data.source import BadSample
from clipx.data.spec import DataSpec
from clipx.data.transform import random_box
from clipx.data.views import ImageView
from clipx.distributed.comm import Comm
from clipx.embed import embed
from clipx.precision.spec import Precision
from clipx.teacher.live import Teacher
from clipx.teacher.spec import TeacherSpec
from clipx.teacher.stored import StoredTeachers, boxes_file, npy_files
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
    options = (f"run={teacher}", f"out={out}", *DATA, f"views={VIEWS}", "seed=5", "samples_per_shard=40", *overrides)
    embed(compose(*options, config_name="embed"))
    return out


@pytest.fixture(scope="module")
def stored(trained: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("views")
    sizes = {"a": "samples_per_shard=40", "b": "samples_per_shard=32"}
    return {name: embedded(trained[name], folder / name, sizes[name]) for name in trained}


def data() -> DataSpec:
    return compose(*SMALL, *DATA).data


def opened(*folders: Path, scale: list[float] = SCALE) -> StoredTeachers:
    return StoredTeachers.open(
        [str(path) for path in folders], [None] * len(folders), data().open().train, {"crop_scale": scale}
    )


def batches(targets: StoredTeachers, second: SecondView | None = None, workers: int = 0, size: int = 48) -> list[Batch]:
    train = data().open().train
    tokenizer = compose(*RUN, "teacher.weights=x").model.text.build_tokenizer()
    options = {"seed": 0, "samples": range(2 * SAMPLES), "batch": 48, "rank": 0, "world": 1, "prefetch": 1}
    return list(
        train_loader(
            train, Order(train.sizes, 0, 100), ImageView(size, SCALE, 10**6), tokenizer,
            **options, workers=workers, pin=False, second=second, targets=targets,  # type: ignore[arg-type]
        )
    )  # fmt: skip


@pytest.mark.parametrize("size", [32, 48])
def test_stored_views_equal_the_live_teacher_on_the_same_crops(
    trained: dict[str, Path], stored: dict[str, Path], size: int
) -> None:
    """The live teacher embeds the crops and captions of the batch. `size`: of the student's images."""
    teacher = Teacher.build(TeacherSpec(weights=str(trained["a"])), ONE, FP32, 1)
    for batch in batches(opened(stored["a"]), teacher.view, size=size):
        image, text, live_image, live_text = teacher(batch).targets
        torch.testing.assert_close(image / teacher.scale, live_image / teacher.scale, rtol=0, atol=1e-6)
        torch.testing.assert_close(text, live_text, rtol=0, atol=1e-6)


def test_views_are_drawn_by_position_and_all_of_them_occur(stored: dict[str, Path]) -> None:
    targets = opened(stored["a"])
    first, other = batches(targets), batches(targets, workers=1)
    for one, two in zip(first, other, strict=True):
        assert torch.equal(one.image, two.image) and all(map(torch.equal, one.targets, two.targets))
    found = set[tuple[int, int]]()
    for batch in first:
        for index, image_T in zip(batch.index.tolist(), batch.targets[0], strict=True):
            rows = np.load(stored["a"] / npy_files(index // 40)[0])[index % 40]
            distance = np.abs(rows * targets.teachers[0].scale - image_T.numpy()).max(1)
            assert distance.min() < 1e-5
            found.add((index, int(distance.argmin())))
    assert {view for _, view in found} == set(range(VIEWS))
    assert len(found) > SAMPLES, "the second epoch draws other views"


def test_boxes_are_those_of_the_seed_the_sample_and_the_view(stored: dict[str, Path]) -> None:
    boxes = np.concatenate([np.load(stored["a"] / boxes_file(number)) for number in range(3)])
    other = np.concatenate([np.load(stored["b"] / boxes_file(number)) for number in range(3)])
    assert boxes.dtype == np.int32 and boxes.shape == (SAMPLES, VIEWS, 4)
    assert np.array_equal(boxes, other), "they do not depend on the teacher, its image size or the size of its shards"
    side = boxes[..., 2:].max().item()
    for index, view in ((0, 0), (7, 2), (95, 1)):
        box = random_box((side, side), SCALE, random.Random(f"5/{index}/{view}"))
        assert tuple(boxes[index, view].tolist()) == box


def test_teachers_with_different_boxes_are_a_bad_sample(stored: dict[str, Path], tmp_path: Path) -> None:
    other = shutil.copytree(stored["b"], tmp_path / "b")
    boxes = np.load(other / boxes_file(0))
    boxes[3] += 1
    np.save(other / boxes_file(0), boxes)
    with pytest.raises(BadSample, match="have different crops: write one of them again"):
        opened(stored["a"], other).draw_crop(3, random.Random(0))


AUGMENTED = (
    "data.crop_ratio=[1,1]",
    *("data.augment.flip=0.5", "data.augment.erase=0.5", "data.augment.color_jitter.probability=1"),
)
AUGMENT = AugmentSpec(flip=0.5, erase=0.5, color_jitter=ColorJitterSpec(probability=1))


@pytest.fixture(scope="module")
def augmented(trained: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded(trained["a"], tmp_path_factory.mktemp("augmented") / "a", *AUGMENTED)


def of_run(*overrides: str) -> dict[str, object]:
    return compose(*SMALL, *DATA, *overrides).data.view_options()


def test_stored_views_equal_the_live_teacher_on_the_same_augmentation(
    trained: dict[str, Path], augmented: Path
) -> None:
    """The augmentation of a view is drawn again in training, from the seed, the sample and the number of the view."""
    teacher = Teacher.build(TeacherSpec(weights=str(trained["a"])), ONE, FP32, 1)
    train = data().open().train
    targets = StoredTeachers.open([str(augmented)], [None], train, of_run(*AUGMENTED))
    view = ImageView(48, SCALE, 10**6, crop_ratio=[1.0, 1.0], augmentation=AUGMENT)
    tokenizer = compose(*RUN, "teacher.weights=x").model.text.build_tokenizer()
    loader = train_loader(
        train, Order(train.sizes, 0, 100), view, tokenizer, seed=0, samples=range(2 * SAMPLES), batch=48, rank=0,
        world=1, workers=0, prefetch=1, pin=False, second=teacher.view, targets=targets,
    )  # fmt: skip
    for batch in loader:
        image, _, live_image, _ = teacher(batch).targets
        torch.testing.assert_close(image / teacher.scale, live_image / teacher.scale, rtol=0, atol=1e-6)
