"""CLIP models of transformers (CLIPModel): tensor names, and conversion to open_clip's names and configuration.

(According to the code of transformers 5.23.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from clipx.errors import CheckpointError
from clipx.extra.hf_clip.format import PREPROCESSOR
from clipx.storage.safe_json import shown
from clipx.weights.clip_config import mlp_ratio
from clipx.weights.files import check_described
from clipx.weights.formats import read_json
from clipx.weights.key_mapping import Rule, check_names, rules_with, tied
from clipx.weights.load import LoadedWeights, ModelFolder
from clipx.weights.open_clip import from_open_clip, spec_of, temperature_of, ties

_BLOCK = {
    "ln_1.*": "layer_norm1.*",
    "attn.in_proj_*": "self_attn.@_proj.*",  # @ is replaced by q, k and v
    "attn.out_proj.*": "self_attn.out_proj.*",
    "ln_2.*": "layer_norm2.*",
    "mlp.c_fc.*": "mlp.fc1.*",
    "mlp.c_proj.*": "mlp.fc2.*",
}

RULES = [
    Rule("visual.class_embedding", "vision_model.embeddings.class_embedding"),
    Rule("visual.positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    Rule("visual.conv1.weight", "vision_model.embeddings.patch_embedding.weight"),
    Rule("visual.ln_pre.*", "vision_model.pre_layrnorm.*"),  # spelled so in transformers
    *rules_with("visual.transformer.resblocks.#.", "vision_model.encoder.layers.#.", _BLOCK),
    Rule("visual.ln_post.*", "vision_model.post_layernorm.*"),
    Rule("visual.proj", "visual_projection.weight", turned=True),
    Rule("token_embedding.weight", "text_model.embeddings.token_embedding.weight"),
    Rule("positional_embedding", "text_model.embeddings.position_embedding.weight"),
    *rules_with("transformer.resblocks.#.", "text_model.encoder.layers.#.", _BLOCK),
    Rule("ln_final.*", "text_model.final_layer_norm.*"),
    Rule("text_projection", "text_projection.weight", turned=True),
    Rule("logit_scale", "logit_scale"),
]
"""Names of a CLIP ViT's tensors in open_clip and in transformers."""

_ACTIVATIONS = {"quick_gelu": True, "gelu": False}
_FILTERS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_BUFFERS = {"vision_model.embeddings.position_ids", "text_model.embeddings.position_ids"}  # of older versions


def read(folder: ModelFolder) -> LoadedWeights:
    """Reads a folder with the config.json of a CLIPModel. Raises CheckpointError for values without counterpart,
    missing and unexpected tensors."""
    name, preprocessor, tensors = folder.name, folder.files.get(PREPROCESSOR), folder.tensors()
    config = _open_clip_config(folder.config, {} if preprocessor is None else read_json(preprocessor), name)
    spec = spec_of(config, name)
    whole = spec.build(torch.device("meta"), torch.float32).state_dict()
    found = list(tied(RULES, ["logit_scale", *(tie.theirs for tie in ties(spec, whole))]))
    wanted = {part for tie in found for part in tie.parts}
    check_names(wanted, tensors.keys() - _BUFFERS, f"{name} does not fit its config.json", "get both again")
    check_described(whole, tensors, name)
    theirs = {tie.ours: tie.read(tensors) for tie in found}
    return LoadedWeights(folder.location, from_open_clip(spec, theirs, folder.location), spec, *temperature_of(theirs))


def _open_clip_config(config: Mapping[str, Any], preprocessor: Mapping[str, Any], name: str) -> dict[str, Any]:
    try:
        return {"model_cfg": _model(config), "preprocess_cfg": _preprocessing(preprocessor)}
    except (TypeError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"the configuration of {name} is not one of a CLIPModel ({error}): get its config.json again"
        ) from None


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    vision, text = config["vision_config"], config["text_config"]
    activation = vision.get("hidden_act", "quick_gelu")
    _require(activation in _ACTIVATIONS, "vision_config.hidden_act", activation)
    _require(text.get("hidden_act", "quick_gelu") == activation, "text_config.hidden_act", text.get("hidden_act"))
    for place, part in (("vision_config", vision), ("text_config", text)):
        eps = part.get("layer_norm_eps", 1e-5)
        _require(eps == 1e-5, f"{place}.layer_norm_eps", eps)
    heads = vision.get("num_attention_heads", 12)
    return {
        "embed_dim": config.get("projection_dim", 512),
        "quick_gelu": _ACTIVATIONS[activation],
        "vision_cfg": {
            "image_size": vision.get("image_size", 224),
            "patch_size": vision.get("patch_size", 32),
            "head_width": vision.get("hidden_size", 768) // heads,
            **_tower(vision, {"width": 768, "layers": 12, "hidden": 3072}),
        },
        "text_cfg": {
            "context_length": text.get("max_position_embeddings", 77),
            "vocab_size": text.get("vocab_size", 49408),
            "heads": text.get("num_attention_heads", 8),
            **_tower(text, {"width": 512, "layers": 12, "hidden": 2048}),
        },
    }


def _tower(config: Mapping[str, Any], usual: Mapping[str, int]) -> dict[str, Any]:
    """`usual`: transformers' defaults, which a config.json may leave out."""
    width, hidden = config.get("hidden_size", usual["width"]), config.get("intermediate_size", usual["hidden"])
    layers = config.get("num_hidden_layers", usual["layers"])
    return {"width": width, "layers": layers, "mlp_ratio": mlp_ratio(width, hidden)}


def _preprocessing(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        ours: config[theirs] for ours, theirs in (("mean", "image_mean"), ("std", "image_std")) if theirs in config
    }
    size, resample = config.get("size"), config.get("resample", 3)
    _require(resample in _FILTERS, "resample", resample)
    stretched = isinstance(size, Mapping) and "height" in size
    return {**found, "interpolation": _FILTERS[resample], "resize_mode": "squash" if stretched else "shortest"}


def _require(ok: bool, key: str, value: Any) -> None:
    if not ok:
        raise CheckpointError(
            f"{key}={shown(value)} of a CLIPModel has no counterpart in clipx: give the weights of another model"
        )
