"""Patch dropout: dropped patches, schedules, logging, resuming, and unchanged evaluation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import VIT, compose, rows, small
from torch import Tensor, nn

from clipx.config.duration import Length
from clipx.errors import CheckpointError, ConfigError
from clipx.model.spec import Varying
from clipx.model.tower_spec import ImageTowerSpec
from clipx.model.vision import ImageTower
from clipx.trainer.gradcache import forward_backward
from clipx.trainer.trainer import Trainer

DROPS = Varying(patch_dropout=True)
SMALL_VIT = {"patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3}  # 16 patches for images of 32 pixels


def tower(name: str, varying: Varying = DROPS, **options: Any) -> ImageTower:
    torch.manual_seed(0)
    return ImageTower(ImageTowerSpec(timm=name, size=32, options=options), 16, False, varying)


def tokens(built: ImageTower) -> int:
    """Returns the number of tokens per image in the first block."""
    seen: list[int] = []
    hook = built.trunk.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    built(torch.rand(2, 3, 32, 32))
    hook.remove()
    return seen[0]


# ----------------------------------------------------------------------------------------------- image tower


@pytest.mark.parametrize(
    ("name", "options", "prefix"),
    [
        ("vit_base_patch16_clip_224", SMALL_VIT, 1),
        ("vit_base_patch16_siglip_224", SMALL_VIT, 0),
        ("eva02_tiny_patch14_224", {"patch_size": 8, "depth": 1}, 1),
    ],
)
def test_blocks_receive_the_remaining_patches_and_all_prefix_tokens(
    name: str, options: dict[str, Any], prefix: int
) -> None:
    built = tower(name, **options).train()
    for share, left in ((0.0, 16), (0.5, 8), (0.75, 4), (0.99, 1), (0.0, 16)):
        built.set_patch_dropout(share)
        assert tokens(built) == prefix + left
    built.set_patch_dropout(0.75)
    assert tokens(built.eval()) == prefix + 16


def test_evaluation_and_weights_are_unaffected_by_patch_dropout() -> None:
    one, other = (
        tower("vit_base_patch16_clip_224", **SMALL_VIT),
        tower("vit_base_patch16_clip_224", Varying(), **SMALL_VIT),
    )
    one.set_patch_dropout(0.5)
    pixels = torch.rand(2, 3, 32, 32)
    assert one.state_dict().keys() == other.state_dict().keys()
    assert torch.equal(one.eval()(pixels), other.eval()(pixels))
    assert not torch.equal(one.train()(pixels), other.train()(pixels))


def test_each_image_drops_different_patches() -> None:
    built = tower("vit_base_patch16_clip_224", **SMALL_VIT).train()
    built.set_patch_dropout(0.5)
    features = built(torch.rand(1, 3, 32, 32).expand(4, -1, -1, -1))
    assert len(torch.unique(features, dim=0)) == 4


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "resnet50_clip", "swin_tiny_patch4_window7_224"])
def test_a_tower_without_patch_dropout_raises_an_error_with_its_name(name: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError) as error:
        ImageTower(ImageTowerSpec(timm=name, size=224), 16, False, DROPS)
    assert str(error.value).startswith(f"model.image.timm={name} does not support patch dropout (")
    assert "choose a ViT, such as model=vit_b16, or set model.patch_dropout and" in str(error.value)


def test_setting_patch_dropout_twice_raises_an_error() -> None:
    with pytest.raises(ConfigError, match=r"has patch_drop_rate, and this run sets patch_dropout: remove one of them"):
        tower("vit_base_patch16_clip_224", **SMALL_VIT, patch_drop_rate=0.5)


# ---------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("overrides", "expected"),  # expected after 0, 20, 40, 60, 80 and 100 of 100 samples
    [
        (("0.5",), [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
        (("0.5", "final=20%"), [0.5, 0.5, 0.5, 0.5, 0, 0]),
        (("0.5", "schedule=linear"), [0.5, 0.4, 0.3, 0.2, 0.1, 0]),
        (("0.2", "schedule=linear", "end=0.6", "final=2st"), [0.2, 0.3, 0.4, 0.5, 0, 0]),
        (("0.5", "schedule=cosine", "end=0.1"), [0.5, 0.4618034, 0.3618034, 0.2381966, 0.1381966, 0.1]),
    ],
)
def test_the_dropped_share_is_a_function_of_the_samples_seen(overrides: tuple[str, ...], expected: list[float]) -> None:
    words = [f"model.patch_dropout={overrides[0]}", *(f"model.patch_dropout_{text}" for text in overrides[1:])]
    share = compose("model=vit_b32", *words).model.patch_dropout_over(Length(1000, 10, 100))
    assert [share(seen) for seen in range(0, 101, 20)] == pytest.approx(expected)


def test_the_two_phase_experiment_ends_without_patch_dropout() -> None:
    share = compose("experiment=patch_dropout_two_phase").model.patch_dropout_over(Length(1000, 10, 1000))
    assert (share(0), share(949), share(950)) == (0.5, 0.5, 0.0)


# --------------------------------------------------------------------------------------------------- training

# Nine patches; a share that falls at each step, the last step without dropout; two micro-batches.
SIX = (
    *VIT,
    *("model.patch_dropout=0.8", "model.patch_dropout_schedule=linear", "model.patch_dropout_end=0.3"),
    *("model.patch_dropout_final=1st", "duration=6st", "data.micro_batches=2"),
    *("checkpoint.every=1st", "checkpoint.keep_last=9", "evaluator=[retrieval]"),
)


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("patches") / "run"
    Trainer(small(run_dir, *SIX)).fit()
    return run_dir


def test_the_current_share_is_logged(reference_run: Path) -> None:
    logged = [row["train/patch_dropout"] for row in rows(reference_run) if "train/loss" in row]
    assert logged == pytest.approx([0.8, 0.7, 0.6, 0.5, 0.4, 0])


def test_a_resumed_run_can_disable_patch_dropout(tmp_path: Path, reference_run: Path) -> None:
    run_dir = tmp_path / "second"
    shutil.copytree(reference_run, run_dir)
    trainer = Trainer(small(run_dir, *VIT, "duration=7st", "data.micro_batches=2", f"resume={run_dir}"))
    assert "model.patch_dropout: 0.8 -> 0.0" in trainer.notes
    assert trainer.fit()["step"] == 7
    assert "train/patch_dropout" not in rows(run_dir)[-1]
    with pytest.raises(CheckpointError, match=r"model\.text\.layers: 2 -> 1"):
        Trainer(small(run_dir, *VIT, "model.text.layers=1", f"resume={run_dir}"))


def test_the_second_forward_of_a_micro_batch_drops_the_same_patches(tmp_path: Path) -> None:
    trainer = Trainer(small(tmp_path, *SIX, "checkpoint=none", "data.micro_batches=3", "data.batch_size=36"))
    batch = next(iter(trainer._batches()))
    forwards: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: tuple[Tensor, Tensor]) -> None:
        forwards.append(output[0].detach().clone())

    hook = trainer.learner.model.register_forward_hook(keep)
    trainer.learner.model.image.set_patch_dropout(0.5)
    forward_backward(
        trainer.learner.model, trainer.learner.objective, batch, 3, trainer.comm, trainer.learner.precision
    )
    first, second, kept, again_first, again_second = forwards
    assert torch.equal(first, again_first) and torch.equal(second, again_second)
    hook.remove()
    chunk = batch.image.chunk(3)[0]
    with torch.no_grad():
        assert not torch.allclose(trainer.learner.model.encode_image(chunk), first), (
            "control: another draw changes the embeddings"
        )
        trainer.learner.model.eval()
        whole = trainer.learner.model.encode_image(chunk)
    assert not torch.allclose(whole, first) and len(kept) == 12
    trainer.close()
