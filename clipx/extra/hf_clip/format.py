"""The format `hf`: folders of transformers' CLIPModel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clipx.weights.formats import TOKENIZER, WeightsFormat, register_format

PREPROCESSOR = "preprocessor_config.json"


def _is_clip_model(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json is of a CLIPModel."""
    towers = (config.get("vision_config"), config.get("text_config"))
    return config.get("model_type") == "clip" and all(isinstance(tower, Mapping) for tower in towers)


register_format(
    WeightsFormat(
        name="hf",
        read="clipx.extra.hf_clip.reading:read",
        recognizes=_is_clip_model,
        files=(PREPROCESSOR, *TOKENIZER),
        write="clipx.extra.hf_clip.writing:write",
        usage='transformers.CLIPModel.from_pretrained("{out}")',
    )
)
