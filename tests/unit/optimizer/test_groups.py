"""Parameter groups: weight decay against open_clip's models and rules, learning-rate scales, Muon's matrices."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import open_clip.model  # type: ignore[import-untyped]
import pytest
import torch
from helpers.optimizers import META, Optimizing
from helpers.runs import compose
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from clipx.model.clip import CLIP
from clipx.objective.base import Objective
from clipx.optimizer.groups import decayed, parameter_groups, set_learning_rate
from clipx.optimizer.spec import DecayRule

MODELS = ["vit_b32", "rn50", "convnext_base_w", "tiny"]
PUBLISHED, CURRENT = DecayRule.published, DecayRule.current


@cache
def ours(name: str) -> CLIP:
    return compose(f"model={name}").model.build(META, torch.float32)


@cache
def theirs(name: str) -> nn.Module:
    config = open_clip.get_model_config(name)
    with META:
        model: nn.Module = open_clip.model.CLIP(**config)
    return model


def reference_groups(model: nn.Module, rule: DecayRule) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Reference of both rules: the lambda of open_clip_train.main, and timm's rule with the model's exemptions."""
    exempt = model.no_weight_decay() if rule is CURRENT else set()

    def kept(name: str, p: Tensor) -> bool:
        if rule is CURRENT:
            return p.ndim <= 1 or name in exempt
        return p.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit_scale" in name

    # clipx keeps the scale in the objective
    parameters = {name: p for name, p in model.named_parameters() if name != "logit_scale"}
    decay = {name: p for name, p in parameters.items() if not kept(name, p)}
    return decay, {name: p for name, p in parameters.items() if name not in decay}


def shapes(parameters: dict[str, Tensor]) -> list[tuple[int, ...]]:
    """Returns sorted shapes, as projections may be transposed, without the leading 1-axes of timm's positions."""
    return sorted(tuple(sorted(size for size in p.shape if size > 1)) for p in parameters.values())


def elements(parameters: dict[str, Tensor]) -> int:
    return sum(p.numel() for p in parameters.values())


@pytest.mark.parametrize("rule", [PUBLISHED, CURRENT])
def test_groups_of_a_vit_equal_open_clip(rule: DecayRule) -> None:
    """Those of a ResNet too, except that the current rule exempts every positional embedding from decay; open_clip's
    ResNet only that of the text."""
    for (our_decay, our_keep), (their_decay, their_keep) in (
        (decayed(ours("vit_b32"), rule), reference_groups(theirs("ViT-B-32"), rule)),
        (decayed(ours("rn50"), rule), reference_groups(theirs("RN50"), rule)),
    ):
        pool = "visual.attnpool.positional_embedding"
        if pool in their_decay and rule is CURRENT:
            their_keep[pool] = their_decay.pop(pool)
        if pool not in their_decay | their_keep:
            assert shapes(our_decay) == shapes(their_decay) and shapes(our_keep) == shapes(their_keep)
        assert elements(our_decay) == elements(their_decay) and elements(our_keep) == elements(their_keep)


def value_by_name(key: str, groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: group[key] for group in groups for name, _ in group["params"]}


def test_patterns_exempt_further_parameters_from_decay() -> None:
    pattern = ["text.token_embedding.*", "image.*.conv1.weight"]
    model = ours("tiny")
    decay, keep = decayed(model, CURRENT, pattern)
    plain, _ = decayed(model, CURRENT)
    exempt = {"text.token_embedding.weight", *(f"image.trunk.layer{n}.0.conv1.weight" for n in (1, 2, 3, 4))}
    assert plain.keys() - decay.keys() == exempt == keep.keys() & plain.keys()
    spec = compose(f"optimizer.no_decay=[{','.join(pattern)}]").optimizer
    rates = value_by_name("weight_decay", parameter_groups(model, Objective(), spec))
    assert {rates[f"model.{name}"] for name in exempt} == {0.0}


def test_each_tower_has_a_separate_learning_rate_scale() -> None:
    run = Optimizing("optimizer.image_lr_scale=0.1", "optimizer.text_lr_scale=2.5")
    scales = value_by_name("lr_scale", run.groups)
    for tower, scale in (("model.image.", 0.1), ("model.text.", 2.5), ("objective.", 1.0)):
        assert {value for name, value in scales.items() if name.startswith(tower)} == {scale}


def test_the_scheduled_rate_is_scaled_per_group_except_constant_rates() -> None:
    run = Optimizing("optimizer.image_lr_scale=0.1", "optimizer.layer_decay=0.5", constant=True)
    for lr in (1e-3, 1e-5, 0.0):
        set_learning_rate(run.optimizer, lr)
        rates = {name: group["lr"] for group in run.optimizer.param_groups for name in group["param_names"]}
        assert rates["model.image.projection.weight"] == lr * 0.1
        assert rates["model.image.trunk.conv1.0.weight"] == lr * 0.1 * 0.5**4
        assert rates["model.text.blocks.0.mlp.fc1.weight"] == lr * 0.5
        assert {rate for name, rate in rates.items() if name.startswith("objective.")} == {1e-3}


# Blocks above a weight. timm gives the first factor to the head of trunks that have layers above the blocks.
ABOVE = {
    "vit_b32": {"image.trunk.norm_pre.weight": 12, "image.trunk.pos_embed": 12, "image.trunk.blocks.0.mlp.fc2.bias": 11,
                "image.trunk.norm.weight": 0, "image.projection.weight": 0, "text.token_embedding.weight": 12,
                "text.blocks.11.attn.proj.weight": 0, "text.projection.weight": 0},
    "rn50": {"image.trunk.stem.conv3.bn.bias": 16, "image.trunk.stages.1.0.shortcut.conv.conv.weight": 12,
             "image.trunk.head.pos_embed": 0, "text.blocks.3.mlp.fc1.weight": 8},
    "convnext_base_w": {"image.trunk.stem.0.weight": 36, "image.trunk.stages.1.downsample.1.weight": 32,
                        "image.trunk.stages.2.blocks.26.gamma": 3, "image.trunk.head.norm.weight": 0},
    "tiny": {"image.trunk.bn1.weight": 4, "image.trunk.layer3.0.downsample.1.weight": 1,
             "image.trunk.layer4.0.bn2.bias": 0, "text.blocks.0.attn.qkv.bias": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_layer_decay_multiplies_once_per_block_above(name: str) -> None:
    spec = replace(compose(f"model={name}").optimizer, layer_decay=0.75)
    scales = value_by_name("lr_scale", parameter_groups(ours(name), Objective(), spec))
    assert {leaf: scales[f"model.{leaf}"] for leaf in ABOVE[name]} == {k: 0.75**n for k, n in ABOVE[name].items()}
    assert min(scales.values()) == 0.75 ** max(ABOVE[name].values())
    assert max(scales.values()) == 1.0
    if name in ("vit_b32", "tiny"):
        timm = param_groups_layer_decay(ours(name).image.trunk, layer_decay=0.75)
        theirs = {id(p): group["lr_scale"] for group in timm for p in group["params"]}
        for leaf, p in ours(name).image.trunk.named_parameters():
            assert scales[f"model.image.trunk.{leaf}"] == pytest.approx(theirs[id(p)], rel=1e-12), leaf


def muon_matrices(groups: list[dict[str, Any]]) -> dict[str, nn.Parameter]:
    return {name: p for group in groups if group.get("use_muon") for name, p in group["params"]}


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("vit_b32", 12 * 4),  # per block: qkv, out, and two of the MLP
        ("rn50", 16 * 3 + 4),  # three kernels per block and a shortcut per stage; neither stem nor attention pool
        ("convnext_base_w", 36 * 2 + 3),  # two of the MLP per block, and between stages; no depthwise kernel
        ("tiny", 4 * 2 + 1 + 3),
    ],
)
def test_muon_uses_the_matrices_inside_the_blocks(name: str, image: int) -> None:
    spec = compose("optimizer=muon").optimizer
    matrices = muon_matrices(parameter_groups(ours(name), Objective(), spec))
    text = {leaf for leaf in matrices if leaf.startswith("model.text.")}
    of_a_block = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    layers = len(ours(name).text.blocks)
    assert text == {f"model.text.blocks.{n}.{leaf}.weight" for n in range(layers) for leaf in of_a_block}
    assert len(matrices) - len(text) == image
    assert not [
        leaf for leaf in matrices for word in ("stem", "conv_dw", "embed", "head", "projection") if word in leaf
    ]
