"""Locked parameters: bit-identical after training, with exact gradients for the rest."""

from __future__ import annotations

from pathlib import Path

import open_clip.model  # type: ignore[import-untyped]
import pytest
import torch
from helpers.runs import VIT, compose, small

from clipx.errors import ConfigError
from clipx.model.batchnorm import BATCH_NORM
from clipx.model.clip import CLIP
from clipx.model.freeze import freeze
from clipx.trainer.trainer import Trainer
from clipx.weights.open_clip import ties

META = torch.device("meta")
# Small values of all sizes that a lock has to work with.
NARROW = ("model.embed_dim=16", "model.text.width=16", "model.text.heads=2", "model.text.context_length=12")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run directories to start from: a ResNet and a ViT."""
    folder = tmp_path_factory.mktemp("weights")
    for name, kind in (("resnet", ()), ("vit", VIT)):
        Trainer(small(folder / name, *kind, *NARROW, "duration=1st", "schedule.warmup=0st")).fit()
    return {"resnet": folder / "resnet", "vit": folder / "vit"}


def options(weights: dict[str, Path], kind: str, *overrides: str) -> tuple[str, ...]:
    return (*(VIT if kind == "vit" else ()), *NARROW, f"model.weights={weights[kind]}", *overrides)


def build_locked(*overrides: str) -> CLIP:
    spec = compose(*VIT, *NARROW, "model.weights=somewhere", *overrides).model
    model = spec.build(META, torch.float32)
    freeze(model, spec)
    return model


def trainable_names(model: CLIP) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_lock_n_leaves_the_n_highest_blocks_and_later_layers_trainable() -> None:
    names = trainable_names(build_locked("model.image.lock=1", "model.text.lock=0"))
    image = {name for name in names if name.startswith("image.")}
    assert {name.removeprefix("image.").split(".")[1] for name in image} == {"weight", "blocks", "norm"}
    assert {name.split(".")[3] for name in image if "blocks" in name} == {"1"}, (
        "only block 1 of the blocks 0 and 1 is trainable"
    )
    assert names - image == {"text.norm.weight", "text.norm.bias", "text.projection.weight"}


@pytest.mark.parametrize("groups", [2, 4])
def test_open_clip_counts_the_projection_as_a_group_of_its_own_towers(groups: int) -> None:
    """lock=N trains what open_clip trains with N + 1 groups."""
    spec = compose(
        "model=vit_b32", "model.weights=x", *(f"model.{t}.lock={groups - 1}" for t in ("image", "text"))
    ).model
    model = spec.build(META, torch.float32)
    freeze(model, spec)
    with META:
        theirs = open_clip.model.CLIP(**open_clip.get_model_config("ViT-B-32"))
    theirs.lock_image_tower(unlocked_groups=groups)
    theirs.lock_text_tower(unlocked_layers=groups)
    trained = {name for name, p in theirs.named_parameters() if p.requires_grad}
    tied = {tie.theirs for tie in ties(spec, [n for n, p in model.named_parameters() if p.requires_grad])}
    assert tied == trained - {"logit_scale"}


LOCKS = {
    "part": ("resnet", "model.image.lock=1", "model.text.lock=1"),
    "masters": ("vit", "model.image.lock=1", "model.text.lock=all", "precision=bf16", "precision.master_weights=true"),
}


@pytest.mark.parametrize("name", LOCKS)
def test_locked_parameters_are_bit_equal_after_training_and_others_change(
    weights: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Trains with weight decay, weight averaging and micro-batches. BatchNorm statistics are locked too."""
    kind, *words = LOCKS[name]
    words += ["optimizer.weight_decay=0.5", "optimizer.ema_decay=0.5", "data.micro_batches=2", "evaluator=[retrieval]"]
    t = Trainer(small(tmp_path / "x", *options(weights, kind, *words)))
    before = {n: x.clone() for n, x in t.learner.weights.state_dict().items()}
    t.fit()
    locked = {n for n, p in t.learner.weights.named_parameters() if not p.requires_grad}
    assert t.learner.average is not None
    for module, owner in ((t.learner.weights, "weights"), (t.learner.average.model, "average")):
        after, parameters = module.state_dict(), dict(module.named_parameters())
        for n in before:
            norm = n not in parameters and f"{n.rpartition('.')[0]}.weight" in locked
            if n in locked or norm:
                assert torch.equal(after[n], before[n]), (owner, n)
            elif n in parameters:
                assert not torch.equal(after[n], before[n]), (owner, n)


def test_locked_batch_norm_stays_frozen_after_evaluation_and_excludes_sync(
    weights: dict[str, Path], tmp_path: Path
) -> None:
    t = Trainer(small(tmp_path / "x", *options(weights, "resnet", "model.image.lock=2", "evaluator=[retrieval]")))
    t.fit()
    norms = [m for m in t.learner.model.modules() if isinstance(m, BATCH_NORM)]
    assert t.learner.model.training and 0 < sum(m.training for m in norms) < len(norms)
    words = ("model.image.lock=all", "distributed.sync_batchnorm=true")
    with pytest.raises(ConfigError, match="or with all of it locked"):
        Trainer(small(tmp_path / "y", *options(weights, "resnet", *words)))
