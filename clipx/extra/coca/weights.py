"""Conversion between CoCaSpec and open_clip's configuration and tensor names: see open_clip.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from clipx.errors import CheckpointError
from clipx.extra.coca.spec import CoCaSpec, DecoderSpec
from clipx.model.spec import ClipSpec
from clipx.model.text_spec import CLIP_VOCABULARY, ClipTextSpec
from clipx.weights import clip_config
from clipx.weights.clip_layout import VIT, blocks, layout_of, text
from clipx.weights.key_mapping import Rule
from clipx.weights.open_clip import Layout
from clipx.weights.open_clip_checkpoint import TEXT_APART, TOP, VISUAL

_POOL = "visual.attn_pool."
_MLP_RATIO = 4.0  # ratio of open_clip's decoders
_RULES = [
    # Before the rules of a ViT without attention pool, whose last norm and projection have other names.
    Rule("image.trunk.norm.*", f"{_POOL}ln_k.*"),
    Rule("image.pool.query", f"{_POOL}query"),
    Rule("image.pool.norm.*", f"{_POOL}ln_q.*"),
    *(Rule(f"image.pool.{x}_weight", f"{_POOL}attn.{x}_proj_weight") for x in "qkv"),
    Rule("image.pool.bias", f"{_POOL}attn.in_proj_bias"),
    Rule("image.pool.proj.*", f"{_POOL}attn.out_proj.*"),
    Rule("image.norm.*", "visual.ln_post.*"),
    *VIT,
    Rule("text.class_token", "text.cls_emb"),
    Rule("decoder.norm.*", "text_decoder.ln_final.*"),
    Rule("decoder.head.weight", "text_decoder.text_projection", turned=True),
]


def rules(spec: CoCaSpec, theirs: Iterable[str] | None) -> list[Rule]:
    """Returns the rules of a model: see open_clip.ties. Raises CheckpointError if open_clip cannot pool its trunk."""
    trunk = spec.build(torch.device("meta"), torch.float32).image.trunk
    _require(
        layout_of(trunk) is VIT and trunk.embed_dim != spec.embed_dim,
        f"open_clip has no CoCa with model.image.timm={spec.image.timm}, of width {trunk.embed_dim}, and "
        f"model.embed_dim={spec.embed_dim}",
        "choose a ViT in CLIP's form, such as vit_base_patch32_clip_224, and another model.embed_dim than its width",
    )
    assert isinstance(spec.text, ClipTextSpec)  # checked by the spec
    return [*_RULES, *_decoder(), *text("text.", spec.text)]


def _decoder() -> list[Rule]:
    """Returns the rules of the decoder. open_clip has the two blocks of a layer in two lists."""
    here, there = "decoder.blocks.#.", "text_decoder.cross_attn.#."
    only_cross = {"norm_image.*": "ln_1_kv.*", "attn.weight": "attn.in_proj_weight", "attn.bias": "attn.in_proj_bias"}
    shared = {"norm1.*": "ln_1.*", "attn.proj.*": "attn.out_proj.*", "norm2.*": "ln_2.*"}
    shared |= {"mlp.fc1.*": "mlp.c_fc.*", "mlp.fc2.*": "mlp.c_proj.*"}
    cross = [Rule(f"{here}cross.{ours}", f"{there}{theirs}") for ours, theirs in (only_cross | shared).items()]
    texts = [
        replace(rule, ours=rule.ours.replace("#.", "#.text."))
        for rule in blocks("decoder.blocks.", "text_decoder.resblocks.")
    ]
    return [*texts, *cross]


def config_of(spec: CoCaSpec) -> dict[str, Any]:
    """Returns open_clip's configuration of a model: see open_clip.config_of."""
    rules(spec, None)
    _require(
        spec.decoder.mlp_ratio == _MLP_RATIO,
        f"open_clip has no CoCa with model.decoder.mlp_ratio={spec.decoder.mlp_ratio:g}",
        f"set it to {_MLP_RATIO:g}",
    )
    towers = ClipSpec(
        name=spec.name, embed_dim=spec.embed_dim, quick_gelu=spec.quick_gelu, image=spec.image, text=spec.text
    )
    config = clip_config.config_of(towers)
    pool = {"attentional_pool": True, "attn_pooler_heads": spec.pool_heads, "attn_pooler_queries": spec.queries}
    text_cfg, vision_cfg = config["text_cfg"], config["vision_cfg"]
    return {
        **config,
        "custom_text": True,
        "vision_cfg": {**vision_cfg, **pool, "output_tokens": True},
        "text_cfg": {**text_cfg, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {
            **{key: text_cfg[key] for key in ("context_length", "vocab_size", "width")},
            "heads": spec.decoder.heads,
            "layers": spec.decoder.layers,
        },
    }


def spec_of(config: dict[str, Any], name: str) -> CoCaSpec:
    """Returns the spec of open_clip's configuration: see open_clip.spec_of."""
    model = dict(config.get("model_cfg", config))
    vision, text_cfg, decoder = (dict(model.pop(key, {})) for key in ("vision_cfg", "text_cfg", "multimodal_cfg"))
    for key, section in (("vision_cfg.attentional_pool", vision), ("text_cfg.embed_cls", text_cfg)):
        found = section.pop(key.partition(".")[2], False)
        _require(found is True, f"{key}={found} in the configuration has no counterpart in clipx", "it must be true")
    queries, pool_heads = vision.pop("attn_pooler_queries", 256), vision.pop("attn_pooler_heads", 8)
    whole = {**model, "vision_cfg": vision, "text_cfg": text_cfg}
    towers = clip_config.spec_of({**config, "model_cfg": whole} if "model_cfg" in config else whole, name)
    text = towers.text
    assert isinstance(text, ClipTextSpec)  # without hf_model_name, which is refused
    return CoCaSpec(
        name=name,
        embed_dim=towers.embed_dim,
        quick_gelu=towers.quick_gelu,
        image=towers.image,
        text=text,
        queries=queries,
        pool_heads=pool_heads,
        decoder=_decoder_spec(decoder, text),
    )


def _decoder_spec(section: dict[str, Any], text_tower: ClipTextSpec) -> DecoderSpec:
    shared = {
        "context_length": text_tower.context_length,
        "vocab_size": text_tower.vocabulary,
        "width": text_tower.width,
    }
    usual = {"context_length": 77, "vocab_size": CLIP_VOCABULARY, "width": 512}
    for key, value in shared.items():
        found = section.pop(key, usual[key])
        _require(
            found == value,
            f"multimodal_cfg.{key}={found} with text_cfg.{key}={value} has no counterpart in clipx",
            "they must be equal",
        )
    heads, layers = section.pop("heads", 8), section.pop("layers", 12)
    for unread in ("mlp_ratio", "dim_head", "n_queries", "attn_pooler_heads"):  # open_clip does not read them either
        section.pop(unread, None)
    key = next(iter(section), "")
    _require(not section, f"multimodal_cfg.{key} in the configuration has no counterpart in clipx", "remove it")
    return DecoderSpec(heads=heads, layers=layers)


def _require(ok: bool, fault: str, instead: str) -> None:
    if not ok:
        raise CheckpointError(f"{fault}: {instead}")


# Order of open_clip's named_parameters(): see open_clip_checkpoint.
_DECODER = (
    r"text_decoder\.text_projection",
    r"text_decoder\.resblocks\.(\d+)\..*",
    r"text_decoder\.cross_attn\.(\d+)\.(?=(ln_2|mlp)?)(?=(ln_1_kv)?).*",
    r"text_decoder\.ln_final\..*",
)
LAYOUT = Layout(
    rules,
    config_of,
    spec_of,
    recognizes=lambda model: "multimodal_cfg" in model,
    order=(*TOP, *TEXT_APART, *VISUAL, *_DECODER),
)
