"""Weights of SigLIP 2 NaFlex in the layout of transformers (Siglip2Model): a folder with config.json.

    read(folder) -> LoadedWeights    spec_of(config, name, tokenizer) -> NaflexSpec
    from_siglip2(spec, tensors) -> tensors

(According to the code of transformers 5.24.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clipx.errors import CheckpointError, ClipxError
from clipx.extra.naflex.spec import NaflexSpec, NaflexTowerSpec
from clipx.model.text_spec import Clean, ClipTextSpec, Gelu, Pool
from clipx.model.tower_spec import Interpolation, Projection
from clipx.storage.safe_json import read_as
from clipx.weights.clip_config import mlp_ratio
from clipx.weights.files import check_described
from clipx.weights.formats import TOKENIZER
from clipx.weights.key_mapping import Rule, check_names, rules_with, tied
from clipx.weights.load import LoadedWeights, ModelFolder
from clipx.weights.open_clip import temperature_of

_TIMM = {  # of the same sizes as timm's models: width, blocks, heads, width of the MLP
    (768, 12, 12, 3072): "naflexvit_base_patch16_siglip",
    (1152, 27, 16, 4304): "naflexvit_so400m_patch16_siglip",
}
_NOT_IN_MODEL = {"logit_scale", "logit_bias", "text_model.embeddings.position_ids"}

_BLOCK = {
    "norm1.*": "layer_norm1.*",
    "attn.qkv.*": "self_attn.@_proj.*",  # @: those of q, k and v are concatenated
    "attn.proj.*": "self_attn.out_proj.*",
    "norm2.*": "layer_norm2.*",
    "mlp.fc1.*": "mlp.fc1.*",
    "mlp.fc2.*": "mlp.fc2.*",
}

_POOL, _HEAD = "image.trunk.attn_pool", "vision_model.head"
_RULES = [
    Rule("image.trunk.embeds.proj.*", "vision_model.embeddings.patch_embedding.*"),
    Rule("image.trunk.embeds.pos_embed", "vision_model.embeddings.position_embedding.weight"),
    *rules_with("image.trunk.blocks.#.", "vision_model.encoder.layers.#.", _BLOCK),
    Rule("image.trunk.norm.*", "vision_model.post_layernorm.*"),
    Rule(f"{_POOL}.latent", f"{_HEAD}.probe"),
    Rule(f"{_POOL}.q.*", f"{_HEAD}.attention.in_proj_*"),  # the first third of its rows
    Rule(f"{_POOL}.kv.*", f"{_HEAD}.attention.in_proj_*"),  # the others
    Rule(f"{_POOL}.proj.*", f"{_HEAD}.attention.out_proj.*"),
    Rule(f"{_POOL}.norm.*", f"{_HEAD}.layernorm.*"),
    Rule(f"{_POOL}.mlp.fc1.*", f"{_HEAD}.mlp.fc1.*"),
    Rule(f"{_POOL}.mlp.fc2.*", f"{_HEAD}.mlp.fc2.*"),
    Rule("text.token_embedding.weight", "text_model.embeddings.token_embedding.weight"),
    Rule("text.positional_embedding", "text_model.embeddings.position_embedding.weight"),
    *rules_with("text.blocks.#.", "text_model.encoder.layers.#.", _BLOCK),
    Rule("text.norm.*", "text_model.final_layer_norm.*"),
    Rule("text.projection.*", "text_model.head.*"),
]
"""Names of tensors in clipx and in transformers."""


# ----------------------------------------------------------------------------------------------- configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tower:
    """Keys of both towers, with the defaults of transformers."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    @property
    def gelu(self) -> Gelu:
        known = {"gelu_pytorch_tanh": Gelu.tanh, "gelu": Gelu.exact}
        _require(self.hidden_act in known, f"hidden_act={self.hidden_act}")
        return known[self.hidden_act]

    @property
    def ratio(self) -> float:
        _require(self.hidden_size >= 1, f"hidden_size={self.hidden_size}")
        return mlp_ratio(self.hidden_size, self.intermediate_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vision(_Tower):
    num_channels: int = 3
    patch_size: int = 16
    num_patches: int = 256
    vision_use_head: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text(_Tower):
    vocab_size: int = 32_000
    max_position_embeddings: int = 64
    projection_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    vision_config: _Vision = field(default_factory=_Vision)
    text_config: _Text = field(default_factory=_Text)


def read(folder: ModelFolder) -> LoadedWeights:
    """Reads a folder with the config.json of a Siglip2Model. Raises CheckpointError for a model that clipx does not
    have, and for tensors that do not fit it."""
    tokenizer = folder.weights.with_name(TOKENIZER[0])
    spec = spec_of(folder.config, folder.name, str(tokenizer))
    tensors = folder.tensors()
    return LoadedWeights(folder.location, from_siglip2(spec, tensors, folder.location), spec, *temperature_of(tensors))


def spec_of(config: Mapping[str, Any], name: str, tokenizer: str) -> NaflexSpec:
    """Returns the spec of a model from the content of config.json.

    `tokenizer`: the place of its tokenizer.json. Raises CheckpointError for a model that clipx does not have.
    """
    try:
        found = read_as(_Config, json.dumps(config))
        vision, text = found.vision_config, found.text_config
        width = vision.hidden_size if text.projection_size is None else text.projection_size
        _require(width == vision.hidden_size, f"text_config.projection_size={width}, not {vision.hidden_size}")
        return NaflexSpec(name=name, embed_dim=vision.hidden_size, image=_image(vision), text=_text(text, tokenizer))
    except (ValueError, ClipxError) as error:
        raise CheckpointError(f"config.json of {name} describes no model of clipx ({error}): give another") from None


def _image(vision: _Vision) -> NaflexTowerSpec:
    side = math.isqrt(max(0, vision.num_patches))
    _require(side > 0 and side**2 == vision.num_patches, f"vision_config.num_patches={vision.num_patches}, no square")
    _require(vision.num_channels == 3, f"vision_config.num_channels={vision.num_channels}")
    _require(vision.vision_use_head, "vision_config.vision_use_head=false")
    _require(vision.layer_norm_eps == 1e-6, f"vision_config.layer_norm_eps={vision.layer_norm_eps}")
    width, depth, heads = vision.hidden_size, vision.num_hidden_layers, vision.num_attention_heads
    timm = _TIMM.get((width, depth, heads, vision.intermediate_size))
    options: dict[str, Any] = {}
    if timm is None:
        timm = next(iter(_TIMM.values()))
        options = {"embed_dim": width, "depth": depth, "num_heads": heads, "mlp_ratio": vision.ratio}
    options |= {} if vision.patch_size == 16 else {"patch_size": vision.patch_size}
    options |= {} if side == 16 else {"pos_embed_grid_size": [side, side]}
    options |= {} if vision.gelu is Gelu.tanh else {"act_layer": "gelu"}
    return NaflexTowerSpec(
        timm=timm,
        options=options,
        max_tokens=vision.num_patches,
        interpolation=Interpolation.bilinear,
        projection=Projection.none,
        mean=[0.5, 0.5, 0.5],
        std=[0.5, 0.5, 0.5],
    )


def _text(text: _Text, tokenizer: str) -> ClipTextSpec:
    return ClipTextSpec(
        context_length=text.max_position_embeddings,
        width=text.hidden_size,
        heads=text.num_attention_heads,
        layers=text.num_hidden_layers,
        mlp_ratio=text.ratio,
        gelu=text.gelu,
        norm_eps=text.layer_norm_eps,
        causal=False,
        pool=Pool.last,
        packed=False,
        projection_bias=True,
        vocabulary=text.vocab_size,
        tokenizer=tokenizer,
        clean=Clean.canonical,
    )


def _require(ok: bool, fault: str) -> None:
    if not ok:
        raise CheckpointError(f"it has {fault}")


# ----------------------------------------------------------------------------------------------------- tensors


def from_siglip2(spec: NaflexSpec, tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """Converts a state_dict of Siglip2Model to clipx's names. Does not compare all shapes.

    Raises CheckpointError for missing and unexpected tensors, by their names in `tensors`.
    """
    expected = spec.build(torch.device("meta"), torch.float32).state_dict()
    ties = list(tied(_RULES, expected))
    wanted, own = {part for tie in ties for part in tie.parts}, tensors.keys() - _NOT_IN_MODEL
    check_names(wanted, own, f"{what} does not fit its config.json", "give the weights of Siglip2Model")
    check_described(expected, tensors, what)
    try:
        return {tie.ours: _converted(tie.ours, tie.read(tensors), expected[tie.ours]) for tie in ties}
    except RuntimeError as error:  # shapes that cannot be joined
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(f"{what} has tensors of other shapes than its config.json ({reason})") from None


def _converted(ours: str, tensor: Tensor, expected: Tensor) -> Tensor:
    """Returns clipx's tensor from that of transformers."""
    if ours.startswith((f"{_POOL}.q.", f"{_POOL}.kv.")):
        third = len(tensor) // 3
        return tensor[:third] if ours.startswith(f"{_POOL}.q.") else tensor[third:]
    return tensor.view(expected.shape) if ours.endswith("embeds.pos_embed") else tensor
