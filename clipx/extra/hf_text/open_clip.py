"""Text towers of transformers in open_clip's configuration and tensor names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from clipx.extra.hf_text.spec import HfTextSpec
from clipx.model.text_spec import Pool, TextProjection
from clipx.storage.hub import HUB
from clipx.weights.clip_config import CLEAN, CLEANINGS, ConfigSection, require_there
from clipx.weights.clip_layout import TextLayout
from clipx.weights.key_mapping import Rule

_POOLS = {Pool.mean: "mean_pooler", Pool.cls: "cls_last_hidden_state_pooler"}
_PROJECTIONS = {TextProjection.linear: "linear", TextProjection.mlp: "mlp", TextProjection.none: None}

_RULES = [
    Rule("text.transformer.**", "text.transformer.**"),
    Rule("text.projection.weight", "text.proj.weight"),
    Rule("text.projection.fc1.weight", "text.proj.0.weight"),
    Rule("text.projection.fc2.weight", "text.proj.2.weight"),
]


def _config_of(spec: HfTextSpec) -> dict[str, Any]:
    require_there(not spec.options, f"model.text.options={spec.options}: it reads config.json unchanged")
    require_there(
        spec.pool in _POOLS and spec.end_id is None and spec.pad_id is None,
        f"model.text.pool={spec.pool}, end_id={spec.end_id} and pad_id={spec.pad_id}: it pools models of transformers "
        "at the first token or by the mean, without the padding of config.json",
    )
    return {
        "context_length": spec.context_length,
        "hf_model_name": spec.source.removeprefix(HUB),
        "hf_model_pretrained": False,
        "hf_tokenizer_name": spec.tokenizer_place.removeprefix(HUB),
        "tokenizer_kwargs": {"clean": CLEAN[spec.clean]},
        "hf_proj_type": _PROJECTIONS[spec.projection],
        "hf_pooler_type": _POOLS[spec.pool],
    }


def _spec_of(section: ConfigSection) -> HfTextSpec:
    """Returns the spec of open_clip's HFTextEncoder. open_clip reads a folder or a repository of the hub."""
    from clipx.extra.hf_text.tower import packs, read_config  # imports transformers

    name = section.take("hf_model_name")
    tokenizer, pooler = section.take("hf_tokenizer_name", name), section.peek("hf_pooler_type", "")
    pools = {**{theirs: ours for ours, theirs in _POOLS.items()}, "cls_pooler": Pool.cls}
    pool = section.choice("hf_pooler_type", "mean_pooler", pools)
    projection = section.choice("hf_proj_type", "mlp", {theirs: ours for ours, theirs in _PROJECTIONS.items()})
    clean = section.section("tokenizer_kwargs", None).choice("clean", "whitespace", CLEANINGS)
    section.expect(tokenizer_mode=None)
    unused = ("vocab_size", "width", "heads", "layers", "mlp_ratio", "pool_type", "eos_id", "pad_id", "no_causal_mask")
    section.ignore("hf_model_pretrained", "output_tokens", "embed_cls", *unused)
    source, place = (given if Path(given).is_dir() else HUB + given for given in (name, tokenizer))
    spec = HfTextSpec(
        source=source,
        context_length=section.take("context_length", 77),
        pool=pool,
        projection=projection,
        tokenizer=None if place == source else place,
        clean=clean,
    )
    config = read_config(spec)
    section.require(
        pooler != "cls_pooler" or config.is_encoder_decoder, "hf_pooler_type", pooler
    )  # else it has a layer
    return replace(spec, packed=packs(config))


LAYOUT = TextLayout(
    lambda prefix, spec: _RULES, _config_of, _spec_of, lambda section: section.peek("hf_model_name", None) is not None
)
