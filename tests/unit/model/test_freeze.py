"""Locked parameters: bit-identical after training, with exact gradients for the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.runs import VIT, compose, small
from torch import Tensor

from clipx.errors import ConfigError
from clipx.model.batchnorm import BATCH_NORM
from clipx.model.clip import CLIP
from clipx.model.freeze import freeze, frozen_count
from clipx.objective.base import StepInputs
from clipx.trainer.gradcache import forward_backward
from clipx.trainer.trainer import Trainer

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


# ------------------------------------------------------------------------------------------------- locked parameters


def test_lock_n_leaves_the_n_highest_blocks_and_later_layers_trainable() -> None:
    names = trainable_names(build_locked("model.image.lock=1", "model.text.lock=0"))
    image = {name for name in names if name.startswith("image.")}
    assert {name.removeprefix("image.").split(".")[1] for name in image} == {"weight", "blocks", "norm"}
    assert {name.split(".")[3] for name in image if "blocks" in name} == {"1"}, (
        "only block 1 of the blocks 0 and 1 is trainable"
    )
    assert names - image == {"text.norm.weight", "text.norm.bias", "text.projection.weight"}


def test_lock_norms_locks_only_batch_norms() -> None:
    spec = compose("model=tiny", "model.weights=somewhere", "model.image.lock=norms").model
    model = spec.build(META, torch.float32)
    freeze(model, spec)
    norms = [module for module in model.modules() if isinstance(module, BATCH_NORM)]
    assert frozen_count(model) == sum(p.numel() for norm in norms for p in norm.parameters())
    assert not any(norm.training for norm in norms) and model.training


# --------------------------------------------------------------------------------------------------------- training

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
    for module, owner in (
        (t.learner.weights, "weights"),
        (t.learner.average.model if t.learner.average else t.learner.model, "average"),
    ):
        after = module.state_dict()
        for n in before:
            module_name = n.rpartition(".")[0]
            norm = n not in dict(module.named_parameters()) and f"{module_name}.weight" in locked
            if n in locked or norm:
                assert torch.equal(after[n], before[n]), (owner, n)
            elif n in dict(module.named_parameters()):
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


# ----------------------------------------------------------------------------------------- gradients and resuming


def gradients(t: Trainer, micro_batches: int) -> dict[str, Tensor]:
    batch = replace(next(iter(t._batches())), packing=())  # packed for data.micro_batches=1
    for module in (t.learner.model, t.learner.objective):
        module.zero_grad()
    loss, _ = forward_backward(t.learner.model, t.learner.objective, batch, micro_batches, t.comm, t.learner.precision)
    found = {
        n: p.grad.clone()
        for n, p in (*t.learner.model.named_parameters(), *t.learner.objective.named_parameters())
        if p.grad is not None
    }
    return {"loss": loss, **found}


def test_gradients_of_a_locked_model_equal_those_of_the_unlocked_model(
    weights: dict[str, Path], tmp_path: Path
) -> None:
    """Trainable parameters have the gradients of plain autograd on the unlocked model; the others have none."""
    fp64 = ("precision=fp64", "checkpoint=none")
    free = Trainer(small(tmp_path / "free", *options(weights, "vit", *fp64)))
    batch = next(iter(free._batches()))
    loss, _ = free.learner.objective(StepInputs(*free.learner.model(batch.image, batch.tokens), batch.index))
    loss.backward()
    t = Trainer(
        small(tmp_path / "locked", *options(weights, "vit", *fp64, "model.image.lock=1", "model.text.lock=all"))
    )
    for micro_batches in (1, 4):
        found = gradients(t, micro_batches)
        assert found.keys() == {"loss", "temperature.log_scale"} | trainable_names(t.learner.model)
        for name, p in (*free.learner.model.named_parameters(), *free.learner.objective.named_parameters()):
            if name in found:
                torch.testing.assert_close(found[name], p.grad, rtol=0, atol=1e-10, msg=name)
