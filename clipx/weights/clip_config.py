"""Conversion between ClipSpec and open_clip's configuration: see open_clip.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import timm
import torch
from timm.layers import QuickGELU, SelectAdaptivePool2d
from timm.models import VisionTransformer
from torch import nn

from clipx.errors import CheckpointError
from clipx.model.spec import ClipSpec
from clipx.model.text_spec import CLIP_VOCABULARY, Clean, ClipTextSpec, Gelu, Pool, TextProjection
from clipx.model.tower_spec import ImageTowerSpec, Interpolation, Projection
from clipx.storage.hub import HUB
from clipx.storage.safe_json import shown
from clipx.weights import clip_layout
from clipx.weights.clip_layout import RESNET, VIT, TextLayout, is_custom, layout_of, text_layout, text_layout_for

T = TypeVar("T")

TRAINING = {"drop_path_rate", "drop_rate", "proj_drop_rate", "attn_drop_rate", "pos_drop_rate", "patch_drop_rate"}
"""Options of timm that affect only the training of a tower, not its architecture."""

_VIT = "vit_base_patch16_clip_224"  # timm's options turn it into any ViT in CLIP's form
_VIT_FORM = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12, "mlp_ratio": 4.0}
_RESNETS = {  # by the layers of the stages
    (3, 4, 6, 3): "resnet50_clip",
    (3, 4, 23, 3): "resnet101_clip",
    (4, 6, 10, 6): "resnet50x4_clip",
    (6, 8, 18, 8): "resnet50x16_clip",
    (3, 15, 36, 10): "resnet50x64_clip",
}
CLEAN = {Clean.clip: "lower", Clean.canonical: "canonicalize", Clean.whitespace: "whitespace"}
CLEANINGS = {theirs: ours for ours, theirs in CLEAN.items()}
_HEAD_WIDTH, _EPS = 64, 1e-5  # open_clip's defaults
_TEXT_SIZES = {  # key of ClipTextSpec: key of text_cfg, and its default in open_clip
    "context_length": ("context_length", 77),
    "vocabulary": ("vocab_size", CLIP_VOCABULARY),
    "width": ("width", 512),
    "heads": ("heads", 8),
    "layers": ("layers", 12),
}
_PROJECTIONS = {Projection.linear: "linear", Projection.mlp: "mlp", Projection.head: "", Projection.none: "none"}
_LAYERS = (Projection.linear, Projection.mlp)  # after the trunk; with them open_clip keeps timm's pool


# --------------------------------------------------------------------------------------------- from clipx to open_clip


def config_of(spec: ClipSpec) -> dict[str, Any]:
    """Returns open_clip's configuration of a model: see open_clip.config_of."""
    trunk = spec.build(torch.device("meta"), torch.float32).image.trunk
    rules = layout_of(trunk)
    if rules is VIT:
        vision = _vit(spec, trunk)
    elif rules is RESNET:
        vision = resnet_form(trunk)
    else:
        vision = _timm(spec, trunk)
    return {
        "embed_dim": spec.embed_dim,
        **({"quick_gelu": True} if spec.quick_gelu else {}),
        **({"custom_text": True} if is_custom(spec) else {}),
        "vision_cfg": {"image_size": spec.image.size, **vision},
        "text_cfg": text_layout(spec.text).config_of(spec.text),
    }


def _vit(spec: ClipSpec, trunk: Any) -> dict[str, Any]:
    block, width = trunk.blocks[0], trunk.embed_dim
    averaged, norm = trunk.global_pool == "avg", last_norm(trunk)
    quick = isinstance(block.mlp.act, QuickGELU)
    require_there(
        quick == spec.quick_gelu and (quick or type(block.mlp.act) is nn.GELU),
        f"model.image.timm={spec.image.timm} has {type(block.mlp.act).__name__}, and model.quick_gelu="
        f"{str(spec.quick_gelu).lower()}: open_clip has one activation for both towers, GELU or QuickGELU",
    )
    ratio = mlp_ratio(width, block.mlp.fc1.out_features)
    head = width // block.attn.num_heads
    scaled = isinstance(block.ls1, nn.Identity)
    return {
        "layers": len(trunk.blocks),
        "width": width,
        **({} if head == _HEAD_WIDTH else {"head_width": head}),
        "patch_size": trunk.patch_embed.patch_size[0],
        **({} if ratio == 4 else {"mlp_ratio": ratio}),
        **({} if scaled else {"ls_init_value": 1e-4}),  # any value: enables the scales
        **({"no_ln_pre": True} if isinstance(trunk.norm_pre, nn.Identity) else {}),
        **({"pool_type": "avg"} if averaged else {}),
        **({"final_ln_after_pool": True} if norm is trunk.fc_norm else {}),
        **_eps(norm.eps),
    }


def last_norm(trunk: Any) -> Any:
    """Returns the last norm of a ViT: that of the tokens, or that of the pooled features."""
    return trunk.norm if isinstance(trunk.fc_norm, nn.Identity) else trunk.fc_norm


def resnet_form(trunk: Any) -> dict[str, Any]:
    """Returns open_clip's keys of a ResNet."""
    width = trunk.stem.conv3.conv.out_channels
    head = width * 32 // trunk.head.num_heads
    return {
        "layers": [len(stage) for stage in trunk.stages],
        "width": width,
        **({} if head == _HEAD_WIDTH else {"head_width": head}),
        "patch_size": None,
    }


def _timm(spec: ClipSpec, trunk: Any) -> dict[str, Any]:
    image = spec.image
    covered = TRAINING if image.projection in _LAYERS else TRAINING | {"global_pool"}
    other = {key: value for key, value in image.options.items() if key not in covered}
    require_there(not other, f"model.image.options={other} has no counterpart there: remove it")
    usual = timm.get_pretrained_cfg(image.architecture)
    fixed = usual is not None and usual.fixed_input_size and getattr(trunk, "pos_embed", "") is not None
    size = usual.input_size[-1] if fixed else image.size
    require_there(
        size == image.size,
        f"model.image.size={image.size}, but open_clip builds {image.timm} for {size} pixels only: choose a timm "
        "architecture for this size",
    )
    require_there(
        not (spec.quick_gelu and isinstance(trunk, VisionTransformer)),
        f"model.quick_gelu=true, which open_clip does not support for a tower from timm, such as {image.timm}",
    )
    pool = "" if image.projection in _LAYERS else pool_of(trunk, image.architecture)
    drop = image.options.get("drop_path_rate")
    return {
        "timm_model_name": image.timm,
        "timm_model_pretrained": False,
        "timm_pool": pool,
        "timm_proj": _PROJECTIONS[image.projection],
        **({} if drop is None else {"timm_drop_path": drop}),
    }


def pool_of(trunk: Any, name: str) -> str:
    """Returns timm's name of a trunk's pooling."""
    attribute = vars(trunk).get("global_pool")
    if isinstance(attribute, str):
        return attribute
    pool = next((m.pool_type for m in trunk.modules() if isinstance(m, SelectAdaptivePool2d)), None)
    require_there(pool is not None, f"model.image.timm={name} does not name its pooling, which open_clip requires")
    return str(pool)


def _text(spec: ClipTextSpec) -> dict[str, Any]:
    usual = ClipTextSpec()
    for key in ("positions", "norm", "mlp", "bias"):
        value = getattr(spec, key)
        require_there(value == getattr(usual, key), f"model.text.{key}={value}: it has CLIP's blocks only")
    ratio = mlp_ratio(spec.width, int(spec.width * spec.mlp_ratio))
    words = {
        **{theirs: getattr(spec, ours) for ours, (theirs, _) in _TEXT_SIZES.items()},
        **({} if ratio == 4 else {"mlp_ratio": ratio}),
        **({} if spec.causal else {"no_causal_mask": True}),
        **_text_pool(spec),
        **({"proj_bias": True} if spec.projection_bias else {}),
        **({} if spec.projection is TextProjection.linear else {"proj_type": "none"}),
        **_eps(spec.norm_eps),
        **({} if spec.gelu is Gelu.exact else {"act_kwargs": {"approximate": "tanh"}}),
    }
    if spec.tokenizer_place != "clip":
        words["hf_tokenizer_name"] = spec.tokenizer_place.removeprefix(HUB)
        stripped = {"strip_sep_token": True} if spec.strip_separator else {}
        words["tokenizer_kwargs"] = {"clean": CLEAN[spec.clean], **stripped}
    return words


def _text_pool(spec: ClipTextSpec) -> dict[str, Any]:
    require_there(spec.pool in (Pool.end, Pool.last), f"model.text.pool={spec.pool}: it pools at one token")
    require_there(
        spec.causal or not spec.packed, "model.text.causal=false with packed=true: its tokens attend to padding"
    )
    if spec.pool is Pool.last:
        return {"pool_type": "last"}
    return {} if spec.end_id is None else {"pool_type": "eos", "eos_id": spec.end_id}


def _eps(eps: float) -> dict[str, Any]:
    return {} if eps == _EPS else {"norm_kwargs": {"eps": eps}}


def mlp_ratio(width: int, hidden: int) -> float:
    """Returns a ratio for which int(width * ratio) is `hidden`, the width of an MLP."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


def require_there(ok: bool, fault: str) -> None:
    """Raises CheckpointError for a model that open_clip's configuration cannot express, by its `fault`."""
    if not ok:
        raise CheckpointError(f"open_clip has no configuration for this model: {fault}")


# --------------------------------------------------------------------------------------------- from open_clip to clipx


def spec_of(config: dict[str, Any], name: str) -> ClipSpec:
    """Returns the spec of open_clip's configuration: see open_clip.spec_of."""
    whole = ConfigSection(config, "")
    described = "model_cfg" in config
    model, prepared = whole.section("model_cfg") if described else whole, whole.section("preprocess_cfg", None)
    vision, text = model.section("vision_cfg"), model.section("text_cfg")
    quick = bool(model.take("quick_gelu", False))
    model.ignore("custom_text", "init_logit_scale", "init_logit_bias", "nonscalar_logit_scale")
    embed_dim = model.take("embed_dim")
    prepared.expect(mode="RGB")
    prepared.ignore("size", "fill_color")
    stretch = prepared.choice("resize_mode", "shortest", {"shortest": False, "squash": True})
    interpolation = prepared.choice("interpolation", "bicubic", Interpolation.__members__)
    timm_name, size = vision.take("timm_model_name", None), vision.take("image_size", 224)
    if isinstance(size, list) and len(set(size)) == 1:
        size = size[0]
    vision.require(isinstance(size, int), "image_size", size)
    vision.ignore("output_tokens", "patch_dropout")
    if timm_name is not None:
        image = _timm_tower(vision, timm_name, size)
    elif isinstance(vision.peek("layers", 12), list):
        image = _resnet_tower(vision, size)
    else:
        image = _vit_tower(vision, size)
    mean, std = (list(map(float, prepared.take(*given))) for given in (("mean", image.mean), ("std", image.std)))
    image = replace(image, stretch=stretch, interpolation=interpolation, mean=mean, std=std)
    spec = ClipSpec(
        name=name, embed_dim=embed_dim, quick_gelu=quick, image=image, text=text_layout_for(text).spec_of(text)
    )
    whole.check_all_read()
    return spec


def _vit_tower(section: ConfigSection, size: int) -> ImageTowerSpec:
    width = section.take("width", 768)
    form = {
        "patch_size": section.take("patch_size", 16),
        "embed_dim": width,
        "depth": section.take("layers", 12),
        "num_heads": width // section.take("head_width", _HEAD_WIDTH),
        "mlp_ratio": section.take("mlp_ratio", 4.0),
    }
    options = {key: value for key, value in form.items() if value != _VIT_FORM[key]}
    if (scale := section.take("ls_init_value", None)) is not None:
        options["init_values"] = scale
    averaged = section.choice("pool_type", "tok", {"tok": False, "avg": True})
    after = section.take("final_ln_after_pool", False)
    section.require(averaged or not after, "final_ln_after_pool", after)
    if averaged:
        options |= {"global_pool": "avg", "fc_norm": after}
    bare = section.take("no_ln_pre", False)
    if bare:
        options["pre_norm"] = False
    section.expect(pos_embed_type="learnable", attentional_pool=False, norm_kwargs=None, act_kwargs=None)
    section.ignore("attn_pooler_queries", "attn_pooler_heads")
    return ImageTowerSpec(timm=_VIT, size=size, options=options, patch_bias=not bare)


def _resnet_tower(section: ConfigSection, size: int) -> ImageTowerSpec:
    layers, width = tuple(section.take("layers")), section.take("width", 64)
    section.ignore("patch_size")
    section.expect(head_width=_HEAD_WIDTH)
    name = _RESNETS.get(layers)
    known = name is not None and resnet_form(timm_on_meta(name))["width"] == width
    if name is None or not known:
        raise CheckpointError(
            f"vision_cfg.layers={list(layers)} with width={width} is not a ResNet of CLIP in timm: use "
            f"{', '.join(_RESNETS.values())}"
        )
    return ImageTowerSpec(timm=name, size=size)


def timm_on_meta(name: str) -> Any:
    """Builds a timm model on the meta device.

    Accepts only names of timm itself: for a name with a prefix such as hf-hub: timm would read a configuration from
    elsewhere. Raises CheckpointError for others.
    """
    if not timm.is_model(name):
        raise CheckpointError(f"vision_cfg.timm_model_name={name} is not a model of timm: install a timm that has it")
    with torch.device("meta"):
        return timm.create_model(name, pretrained=False, num_classes=0)


def _timm_tower(section: ConfigSection, name: str, size: int) -> ImageTowerSpec:
    ways: dict[Any, Projection] = {**{theirs: ours for ours, theirs in _PROJECTIONS.items()}, None: Projection.head}
    way, pool = section.choice("timm_proj", "linear", ways), section.take("timm_pool", "avg")
    section.expect(timm_proj_bias=False)
    drop = section.take("timm_drop_path", None)
    section.ignore("timm_model_pretrained", "timm_drop", "layers", "width", "patch_size", "head_width", "mlp_ratio")
    options: dict[str, Any] = {} if drop is None else {"drop_path_rate": drop}
    if pool != pool_of(timm_on_meta(name), name) and (pool or way not in _LAYERS):
        section.require(bool(pool) and way not in _LAYERS, "timm_pool", pool)
        options["global_pool"] = pool
    return ImageTowerSpec(timm=name, size=size, projection=way, options=options)


def _text_tower(section: ConfigSection) -> ClipTextSpec:
    causal, tokenizer = not section.take("no_causal_mask", False), section.take("hf_tokenizer_name", None)
    at_end = "argmax" if tokenizer is None else "eos"
    pool = section.choice("pool_type", "argmax", {at_end: Pool.end, "last": Pool.last})
    cleaning, act, norm = (section.section(f"{key}_kwargs", None) for key in ("tokenizer", "act", "norm"))
    section.expect(
        hf_model_name=None, ls_init_value=None, embed_cls=False, tokenizer_mode=None, final_ln_after_pool=False
    )
    section.ignore("output_tokens", "pad_id", "hf_model_pretrained")
    end_id = section.take("eos_id", 2)
    return ClipTextSpec(
        **{ours: section.take(theirs, usual) for ours, (theirs, usual) in _TEXT_SIZES.items()},
        mlp_ratio=section.take("mlp_ratio", 4.0),
        causal=causal,
        pool=pool,
        end_id=None if tokenizer is None or pool is Pool.last else end_id,
        strip_separator=cleaning.take("strip_sep_token", False),
        projection=section.choice("proj_type", "linear", TextProjection.__members__),
        projection_bias=section.take("proj_bias", False),
        norm_eps=norm.take("eps", _EPS),
        gelu=act.choice("approximate", "none", {"none": Gelu.exact, "tanh": Gelu.tanh}),
        tokenizer="clip" if tokenizer is None else HUB + tokenizer,
        clean=cleaning.choice("clean", "lower" if tokenizer is None else "whitespace", CLEANINGS),
        packed=causal and pool is Pool.end,
    )


TEXT = TextLayout(clip_layout.text, _text, _text_tower)


class ConfigSection:
    """Section of a configuration. Records the keys that were read, because all must be."""

    def __init__(self, values: Any, path: str) -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{path or 'the configuration'} is {shown(values)}, not a mapping: restore it")
        self._unread, self._path, self._parts = dict(values), path, list[ConfigSection]()

    def peek(self, key: str, default: Any) -> Any:
        """Returns the value of a key without marking it as read."""
        return self._unread.get(key, default)

    def take(self, key: str, *default: Any) -> Any:
        if key not in self._unread and not default:
            raise CheckpointError(f"{self._full_key(key)} is missing in the configuration: restore it")
        return self._unread.pop(key, *default)

    def section(self, key: str, *default: None) -> ConfigSection:
        """Returns the section of a key; an empty one for null, where null is a default."""
        found = self.take(key, *default)
        self._parts.append(ConfigSection({} if default and found is None else found, self._full_key(key)))
        return self._parts[-1]

    def choice(self, key: str, usual: str, choices: Mapping[Any, T]) -> T:
        """Returns the choice that a key names, or `usual` does. Raises CheckpointError for another name."""
        name = self.take(key, usual)
        self.require(name in choices, key, name)
        return choices[name]

    def ignore(self, *keys: str) -> None:
        """Marks keys as read that have no effect on the model in clipx."""
        for key in keys:
            self._unread.pop(key, None)

    def expect(self, **values: Any) -> None:
        """Reads keys that may be absent or have the given values. Raises CheckpointError for other values."""
        for key, value in values.items():
            found = self.take(key, value)
            self.require(found == value, key, found)

    def require(self, ok: bool, key: str, value: Any) -> None:
        if not ok:
            text = shown(value).strip("'")
            raise CheckpointError(
                f"{self._full_key(key)}={text} in the configuration has no counterpart in clipx: remove it if these "
                "weights do not need it, or give the weights of another model"
            )

    def check_all_read(self) -> None:
        for key, value in self._unread.items():
            self.require(False, key, value)
        for part in self._parts:
            part.check_all_read()

    def _full_key(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key
