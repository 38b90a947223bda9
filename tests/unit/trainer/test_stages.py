"""Stages: parts of a run with different image sizes, batch sizes, learning rates and patch dropout."""

from __future__ import annotations

import shutil
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from helpers.runs import VIT, compose, rows, small, tensors

from clipx.config.duration import Length
from clipx.data.batch import Batch
from clipx.model.spec import Varying
from clipx.objective.base import Metrics
from clipx.trainer.stages import Stages
from clipx.trainer.trainer import Trainer


def plan(stages: str, *overrides: str, total: int = 1000, epoch: int = 500) -> Stages:
    spec = compose("model=vit_b32", "data.batch_size=10", f"duration={total}sa", f"stages={stages}", *overrides)
    return Stages.build(spec, Length(epoch, 10, total))


def test_stages_cover_all_samples_with_ends_rounded_up_to_whole_steps() -> None:
    made = plan("[{until:33.3%,batch_size:40,image_size:96},{until:1ep,lr_scale:0.5},{batch_size:64}]")
    assert [(stage.start, stage.end) for stage in made.spans] == [(0, 360), (360, 500), (500, 948)]
    assert [samples for _, samples in made.remaining(0)] == [range(360), range(360, 500), range(500, 948)]
    assert [samples for _, samples in made.remaining(360)] == [range(360, 500), range(500, 948)]
    assert [samples for _, samples in made.remaining(490)] == [range(490, 500), range(500, 948)]
    ends = list(accumulate([40] * 9 + [10] * 14 + [64] * 7))
    assert [made.steps(end) for end in ends] == list(range(1, 31))
    assert made.describe().startswith("9 steps of 40 at 96 pixels, up to sample 360; 14 steps of 10 at 224 pixels")


def test_rate_size_and_patch_dropout_follow_the_stage() -> None:
    whole = plan("[{until:50%,image_size:96},{}]", "model.patch_dropout=0.5", "model.patch_dropout_final=10%")
    assert [whole.at(seen).patch_dropout for seen in (0, 500, 890, 900)] == [0.5, 0.5, 0.5, 0]
    rate = ("optimizer.lr=2", "schedule=constant", "schedule.warmup=0st")
    made = plan("[{until:50%,image_size:96,lr_scale:0.5,patch_dropout:0.6},{until:80%,patch_dropout:0.3},{}]", *rate)
    assert [made.at(seen).learning_rate for seen in (0, 490, 500, 990)] == [1, 1, 2, 2]
    assert [made.at(seen).patch_dropout for seen in (490, 500, 800, 1000)] == [0.6, 0.3, 0, 0]
    assert made.varying == Varying(patch_dropout=True, sizes=(96,))
    assert made.metrics(made.at(500)) == {
        "train/lr": 2,
        "train/image_size": 224,
        "train/batch_size": 10,
        "train/patch_dropout": 0.3,
    }


# Four steps of 16, three of 24 and two of 32, in epochs of 75 samples: a stage ends within an epoch. Dropout draws
# random numbers.
STAGES = (
    "stages=[{until:60sa,image_size:32,batch_size:16,patch_dropout:0.5},"
    "{until:136sa,image_size:32,batch_size:24,lr_scale:0.5},{}]"
)
NINE = (
    *VIT,
    "+model.image.options.proj_drop_rate=0.1",
    STAGES,
    *("data.samples=75", "duration=208sa", "schedule.warmup=40sa", "log_every=1sa", "data.micro_batches=2"),
    *("checkpoint.every=1sa", "checkpoint.keep_last=20", "evaluator=[retrieval]", "evaluator.retrieval.every=100sa"),
)


class Watched(Trainer):
    """Remembers the number of samples and pixels of each step, and the indices of the samples."""

    shapes: list[tuple[int, int]]
    index: list[int]

    def step(self, batch: Batch) -> Metrics:
        self.shapes.append((len(batch.index), batch.image.rows[0].shape[-1]))
        self.index += batch.index.tolist()
        return super().step(batch)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watched]:
    trainer = Watched(small(tmp_path_factory.mktemp("stages") / "run", *NINE))
    trainer.shapes, trainer.index = [], []
    trainer.fit()
    return trainer.run.dir.path, trainer


def test_steps_use_their_stages_sizes_and_read_every_sample_once(uninterrupted: tuple[Path, Watched]) -> None:
    run_dir, trainer = uninterrupted
    assert trainer.shapes == [(16, 32)] * 4 + [(24, 32)] * 3 + [(32, 48)] * 2
    assert trainer.index == [trainer.data.order(position) for position in range(200)]
    logged = [row for row in rows(run_dir) if "train/loss" in row]
    assert [row["step"] for row in logged] == list(range(1, 10))
    assert [row["samples"] for row in logged] == [16, 32, 48, 64, 88, 112, 136, 168, 200]
    assert [row["train/image_size"] for row in logged] == [32] * 7 + [48] * 2
    assert [row["train/patch_dropout"] for row in logged] == [0.5] * 4 + [0.0] * 5


def test_a_run_resumes_inside_a_stage_bit_for_bit(tmp_path: Path, uninterrupted: tuple[Path, Watched]) -> None:
    run_dir = tmp_path / "resumed"
    shutil.copytree(uninterrupted[0], run_dir)
    torch.manual_seed(999)
    trainer = Trainer(small(run_dir, *NINE, "resume=step:2"))
    assert trainer.steps_done == 2
    trainer.fit()
    expected, found = tensors(uninterrupted[0], 9), tensors(run_dir, 9)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
