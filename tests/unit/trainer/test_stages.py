"""Stages: parts of a run with different image sizes, batch sizes, learning rates and patch dropout."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.runs import VIT, compose, rows, small, tensors

from clipx.config.duration import Length
from clipx.config.saved import from_dict, to_dict
from clipx.data.batch import Batch
from clipx.errors import CheckpointError, ConfigError
from clipx.model.spec import Varying
from clipx.model.tower_spec import ImageTowerSpec
from clipx.model.vision import ImageTower
from clipx.trainer.spec import RunSpec
from clipx.trainer.stages import StagePlan, check_ranks
from clipx.trainer.trainer import Trainer


def plan(stages: str, *overrides: str, total: int = 1000, epoch: int = 500) -> StagePlan:
    spec = compose("model=vit_b32", "data.batch_size=10", f"duration={total}sa", f"stages={stages}", *overrides)
    return StagePlan.build(spec.stages, spec.model, spec.data, spec.duration, Length(epoch, 10, total))


def test_stages_cover_all_samples_with_ends_rounded_up_to_whole_steps() -> None:
    made = plan("[{until:33.3%,batch_size:40,image_size:96},{until:1ep,lr_scale:0.5},{batch_size:64}]")
    assert [(stage.start, stage.end) for stage in made.stages] == [(0, 360), (360, 500), (500, 948)]
    assert [samples for _, samples in made.remaining(0)] == [range(360), range(360, 500), range(500, 948)]
    assert [samples for _, samples in made.remaining(360)] == [range(360, 500), range(500, 948)]
    assert [samples for _, samples in made.remaining(490)] == [range(490, 500), range(500, 948)]
    ends = list(accumulate([40] * 9 + [10] * 14 + [64] * 7))
    assert [made.steps(end) for end in ends] == list(range(1, 31))
    assert made.describe().startswith("9 steps of 40 at 96 pixels, up to sample 360; 14 steps of 10 at 224 pixels")


def test_rate_size_and_patch_dropout_follow_the_stage() -> None:
    whole = plan("[{until:50%,image_size:96},{}]", "model.patch_dropout=0.5", "model.patch_dropout_final=10%")
    assert [whole.patch_dropout(seen) for seen in (0, 500, 890, 900)] == [0.5, 0.5, 0.5, 0]
    made = plan("[{until:50%,image_size:96,lr_scale:0.5,patch_dropout:0.6},{until:80%,patch_dropout:0.3},{}]")
    rate = made.scaled(lambda seen: 2.0)
    assert [rate(seen) for seen in (0, 490, 500, 990)] == [1, 1, 2, 2]
    assert [made.patch_dropout(seen) for seen in (490, 500, 800, 1000)] == [0.6, 0.3, 0, 0]
    assert made.varying == Varying(patch_dropout=True, sizes=(96,))
    assert made.row(500) == {"train/image_size": 224, "train/batch_size": 10, "train/patch_dropout": 0.3}


def test_stages_that_do_not_fit_data_or_ranks_are_rejected_before_training() -> None:
    spec = compose("stages=[{until:50%,batch_size:100},{}]", "data.micro_batches=2", "data.batch_size=96")
    check_ranks(spec.stages, spec.data, 2)
    with pytest.raises(ConfigError, match=r"^stages.0.batch_size=100 is not divisible by 3 ranks x 2 micro-batches"):
        check_ranks(spec.stages, spec.data, 3)
    with pytest.raises(ConfigError, match=r"^stages.1.until=1ep is not after stages.0.until=60%"):
        plan("[{until:60%,batch_size:20},{until:1ep},{lr_scale:2}]")
    with pytest.raises(ConfigError, match=r"^stages.1 starts at sample 480 and is shorter than one step of 10: end it"):
        plan("[{until:25%,batch_size:480},{until:30%},{lr_scale:2}]")
    with pytest.raises(ConfigError, match=r"^stages.0.batch_size=600 is larger than the data set of 500 samples"):
        plan("[{until:60%,batch_size:600},{}]")


@pytest.mark.parametrize(("name", "size"), [("vit_base_patch32_clip_224", 100), ("beit_base_patch16_224", 128)])
def test_an_unsupported_image_size_is_rejected_by_tower_name(name: str, size: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"^stages: image_size={size} does not fit timm's {name} built for .*=224 \("
    ):
        tower(name, 224, size)


@pytest.mark.parametrize(
    ("name", "size"),
    [("eva02_tiny_patch14_224", 112), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("resnet50_clip", 160), ("convnext_tiny", 100)))],
)  # fmt: skip
def test_towers_for_several_image_sizes_have_the_same_weights(name: str, size: int) -> None:
    both, alone = tower(name, 224, size), tower(name, 224)
    assert both(torch.empty(1, 3, size, size, device="meta")).shape == (1, 16)
    assert {n: p.shape for n, p in both.state_dict().items()} == {n: p.shape for n, p in alone.state_dict().items()}


def tower(name: str, size: int, *others: int) -> ImageTower:
    with torch.device("meta"):
        return ImageTower(ImageTowerSpec(timm=name, size=size), 16, False, Varying(sizes=others))


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


@dataclass
class Seen:
    """Samples that a run read, and image sizes that it evaluated."""

    shapes: list[tuple[int, int]] = field(default_factory=list)  # number of samples and pixels of each step
    index: list[int] = field(default_factory=list)
    evaluated: set[int] = field(default_factory=set)  # pixels


class Watched(Trainer):
    seen: Seen

    def _count(self, batch: Batch) -> None:
        self.seen.shapes.append((len(batch.index), batch.image.shape[-1]))
        self.seen.index += batch.index.tolist()
        super()._count(batch)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watched]:
    trainer = Watched(small(tmp_path_factory.mktemp("stages") / "run", *NINE))
    trainer.seen = Seen()

    def evaluated(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if not trainer.learner.model.training:
            trainer.seen.evaluated.add(args[0].shape[-1])

    trainer.learner.model.image.register_forward_pre_hook(evaluated)
    trainer.fit()
    return trainer.rundir.path, trainer


def test_steps_use_their_stages_sizes_and_evaluation_the_final_size(uninterrupted: tuple[Path, Watched]) -> None:
    run_dir, trainer = uninterrupted
    assert trainer.seen.shapes == [(16, 32)] * 4 + [(24, 32)] * 3 + [(32, 48)] * 2
    assert trainer.seen.evaluated == {48}
    logged = [row for row in rows(run_dir) if "train/loss" in row]
    assert [row["step"] for row in logged] == list(range(1, 10))
    assert [row["samples"] for row in logged] == [16, 32, 48, 64, 88, 112, 136, 168, 200]
    assert [row["train/image_size"] for row in logged] == [32] * 7 + [48] * 2
    assert [row["train/patch_dropout"] for row in logged] == [0.5] * 4 + [0.0] * 5


def test_no_sample_is_lost_or_repeated_between_stages(uninterrupted: tuple[Path, Watched]) -> None:
    _, trainer = uninterrupted
    assert trainer.seen.index == [trainer.order(position) for position in range(200)]


def test_the_rate_is_the_schedule_by_samples_times_the_stages_scale(uninterrupted: tuple[Path, Watched]) -> None:
    run_dir, trainer = uninterrupted
    rate = trainer.spec.schedule.build(trainer.spec.optimizer.lr, trainer.length)
    starts = [0, 16, 32, 48, 64, 88, 112, 136, 168]
    expected = [rate(start) * (0.5 if 64 <= start < 136 else 1) for start in starts]
    assert [row["train/lr"] for row in rows(run_dir) if "train/loss" in row] == expected


@pytest.mark.parametrize("step", slow_except([2, 4], 4))
def test_a_run_resumes_in_any_stage_bit_for_bit(tmp_path: Path, uninterrupted: tuple[Path, Watched], step: int) -> None:
    run_dir = tmp_path / "resumed"
    shutil.copytree(uninterrupted[0], run_dir)
    torch.manual_seed(999)
    trainer = Trainer(small(run_dir, *NINE, f"resume=step:{step}"))
    assert trainer.steps_done == step
    trainer.fit()
    expected, found = tensors(uninterrupted[0], 9), tensors(run_dir, 9)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_only_future_stages_can_be_changed_at_resume(tmp_path: Path, uninterrupted: tuple[Path, Watched]) -> None:
    run_dir = tmp_path / "changed"
    shutil.copytree(uninterrupted[0], run_dir)
    later = [word for word in NINE if not word.startswith("stages=")]
    with pytest.raises(CheckpointError, match=r"is of step 9 after 200 samples, but .* now give step 6: do not change"):
        Trainer(small(run_dir, *later, "resume=auto"))
    longer = STAGES.replace("{}", "{until:200sa},{batch_size:24}")
    trainer = Trainer(small(run_dir, *later, longer, "duration=230sa", "resume=auto"))
    assert any(note.startswith("stages: ") for note in trainer.notes)
    assert trainer.fit()["step"] == 10


def test_all_image_sizes_share_the_same_weights(uninterrupted: tuple[Path, Watched]) -> None:
    """Compares with a model built without stages, as `clipx.evaluate` builds it."""
    _, trainer = uninterrupted
    alone = trainer.spec.model.build(torch.device("cpu"), torch.float32)
    alone.load_state_dict(trainer.learner.model.state_dict())
    image = torch.rand(2, 3, 48, 48)
    with torch.no_grad():
        assert torch.equal(alone.eval().encode_image(image), trainer.learner.model.eval().encode_image(image))
        small_image = torch.rand(2, 3, 32, 32)
        assert trainer.learner.model.encode_image(small_image).shape == (2, 128)
        with pytest.raises(ValueError, match=r"images have shape .*, must be \[B, 3, 48, 48\]: resize"):
            alone.encode_image(small_image)


def test_stages_are_saved_and_loaded() -> None:
    spec = compose("experiment=progressive_resolution")
    assert [stage.image_size for stage in spec.stages] == [112, 160, None]
    assert from_dict(RunSpec, to_dict(spec)) == spec
    made = StagePlan.build(spec.stages, spec.model, spec.data, spec.duration, Length(10**7, 32768, 32 * 10**7))
    spec.model.build(torch.device("meta"), torch.float32, made.varying)
