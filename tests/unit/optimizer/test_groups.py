"""Parameter groups: weight decay against open_clip's models and rules, learning-rate scales, Muon's matrices."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from typing import Any

import open_clip.model  # type: ignore[import-untyped]
import pytest
import timm
import torch
from helpers.optimizers import META, Optimizing
from helpers.runs import compose
from timm.models import group_parameters
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from clipx.errors import ConfigError
from clipx.model.clip import CLIP
from clipx.model.freeze import freeze
from clipx.model.vision import trunk_options
from clipx.objective.base import Objective
from clipx.optimizer.groups import decayed, parameter_groups, set_learning_rate
from clipx.optimizer.spec import DecayRule
from clipx.weights.open_clip import ties

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
        assert rates["model.image.trunk.conv1.0.weight"] == lr * 0.1 * 0.5**5
        assert rates["model.text.blocks.0.mlp.fc1.weight"] == lr * 0.5**2
        assert {rate for name, rate in rates.items() if name.startswith("objective.")} == {1e-3}


def lr_scales(model: CLIP, decay: float, *words: str) -> dict[str, float]:
    groups = parameter_groups(model, Objective(), replace(compose(*words).optimizer, layer_decay=decay))
    return value_by_name("lr_scale", groups)


def layer_groups(model: Any) -> dict[str, int]:
    """Reference of open_clip's rule of main: the number of groups above each parameter of a model of open_clip 3.3,
    which has no groups itself. Its own ViT and text tower are embeddings, blocks and a projection; the last norm is in
    the group of the last block. A model of timm in open_clip has timm's groups, and above them the projection."""
    tower: dict[str, list[str]] = {"image": [], "text": []}
    for name, _ in model.named_parameters():
        tower["image" if name.startswith("visual.") else "text"].append(name)
    places: dict[str, float] = {}
    trunk = getattr(model.visual, "trunk", None)
    if trunk is not None:
        of_timm = group_parameters(trunk, trunk.group_matcher(coarse=False), reverse=True)
        places = {f"visual.trunk.{name}": place for name, place in of_timm.items()}
    for names in tower.values():
        numbered = {n: re.search(r"transformer\.resblocks\.(\d+)\.", n) for n in names}
        last = max((int(found[1]) for found in numbered.values() if found), default=0)
        for name in set(names) - places.keys():
            if found := numbered[name]:
                places[name] = int(found[1])
            elif name.endswith(("visual.proj", "visual.head.proj.weight", "text_projection")):
                places[name] = math.inf
            else:
                places[name] = last if ("ln_post" in name or "ln_final" in name) else -1
    return {
        name: len({places[other] for other in names if places[other] > places[name]})
        for names in tower.values()
        for name in names
    }


@pytest.mark.parametrize(("name", "official"), [("vit_b32", "ViT-B-32"), ("convnext_base_w", "convnext_base_w")])
def test_layer_decay_of_each_weight_is_that_of_open_clip(name: str, official: str) -> None:
    """Compares by the names of both libraries. The projection has the full rate, and the highest block of a ViT the decay."""
    model, expected = ours(name), layer_groups(theirs(official))
    scales = lr_scales(model, 0.75, f"model={name}")
    tied = {tie.ours: tie.theirs for tie in ties(model.spec, dict(model.named_parameters()))}
    assert set(tied.values()) | {"logit_scale"} == expected.keys()
    for leaf, other in tied.items():
        assert scales[f"model.{leaf}"] == pytest.approx(0.75 ** expected[other], rel=1e-12), leaf
    assert scales["model.image.projection.weight"] == scales["model.text.projection.weight"] == 1
    assert scales["model.text.blocks.11.mlp.fc1.weight"] == scales["model.text.norm.weight"] == 0.75
    assert scales["model.text.token_embedding.weight"] == pytest.approx(0.75**13, rel=1e-12)


@pytest.mark.parametrize("name", ["vit_b32", "tiny", "rn50"])
def test_layer_decay_of_a_trunk_is_that_of_timm_with_a_head(name: str) -> None:
    """The head of timm is the projection, as it is with model.image.projection=head and in CLIP's ResNets."""
    spec = ours(name).spec.image
    with META:
        twin: Any = timm.create_model(spec.architecture, num_classes=9, **trunk_options(spec))
    rates = {
        id(p): group["lr_scale"] for group in param_groups_layer_decay(twin, layer_decay=0.75) for p in group["params"]
    }
    expected = {leaf: rates[id(p)] for leaf, p in twin.named_parameters()}
    scales = lr_scales(ours(name), 0.75, f"model={name}")
    for leaf, _ in ours(name).image.trunk.named_parameters():
        assert scales[f"model.image.trunk.{leaf}"] == pytest.approx(expected[leaf], rel=1e-12), leaf
    assert min(expected.values()) < 0.75**4 and max(expected.values()) == 1
    if name != "rn50":
        assert scales["model.image.projection.weight"] == 1


def test_layer_decay_of_a_block_is_that_of_beit() -> None:
    """d ** (blocks + 1 - id), where the embeddings have id 0, block i has i + 1, and the head blocks + 1."""
    scales = lr_scales(ours("vit_b32"), 0.65, "model=vit_b32")
    ids = {"pos_embed": 0, **{f"blocks.{i}.attn.qkv.weight": i + 1 for i in range(12)}}
    for leaf, number in ids.items():
        assert scales[f"model.image.trunk.{leaf}"] == pytest.approx(0.65 ** (12 + 1 - number), rel=1e-12)


# Layers above a weight of towers that no library counts.
ABOVE = {
    "coca_tiny": {"image.pool.query": 0, "image.norm.weight": 0, "image.trunk.norm.weight": 1, "decoder.head.weight": 0,
                  "decoder.norm.weight": 1, "decoder.blocks.1.cross.mlp.fc1.weight": 1, "text.norm.weight": 1,
                  "decoder.blocks.0.text.attn.qkv.weight": 2, "text.class_token": 3},
    "vit_b16_siglip": {"image.trunk.attn_pool.q.weight": 0, "image.trunk.norm.weight": 1, "text.norm.bias": 1,
                       "image.trunk.patch_embed.proj.weight": 13, "text.projection.weight": 0},
    "stored_features model.image.features=8": {"image.projection.weight": 0, "text.blocks.0.norm1.bias": 1},
    "vit_b32 model.image.projection=none model.embed_dim=768": {"image.trunk.norm.weight": 0, "image.trunk.pos_embed": 12},
    "tiny model.image.timm=vit_small_patch14_reg4_dinov2 model.image.size=56 model.image.head_blocks=2":
        {"image.head.blocks.0.attn.qkv.weight": 0, "image.head.norm.weight": 0, "image.trunk.norm.weight": 1},
    "vit_b32 model.text.pool=map model.text.projection=none model.text.width=512":
        {"text.pool.attention.latent": 0, "text.norm.weight": 1, "text.blocks.11.attn.proj.weight": 1},
}  # fmt: skip


@pytest.mark.parametrize("words", ABOVE)
def test_layer_decay_multiplies_once_per_layer_above(words: str) -> None:
    """Heads, pools and head_blocks have the rate of the projection; without any of these the highest block has it."""
    given = f"model={words}".split()
    scales = lr_scales(compose(*given).model.build(META, torch.float32), 0.5, *given)
    assert {leaf: scales[f"model.{leaf}"] for leaf in ABOVE[words]} == {k: 0.5**n for k, n in ABOVE[words].items()}
    assert max(scales.values()) == 1.0


def test_layer_decay_without_effect_is_an_error() -> None:
    for words, effect in ((("image.lock=0", "text.lock=all"), False), (("image.lock=1", "text.lock=all"), True)):
        spec = compose("model=vit_b32", "model.weights=x", *(f"model.{word}" for word in words)).model
        model = spec.build(META, torch.float32)
        freeze(model, spec)
        if effect:
            assert set(lr_scales(model, 0.5).values()) == {1.0, 0.5}
        else:
            with pytest.raises(
                ConfigError, match=r"layer_decay=0.5 has no effect if only the highest layer of a tower"
            ):
                lr_scales(model, 0.5)


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
