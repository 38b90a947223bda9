"""All configurations that the installed open_clip ships; of each form one with few blocks: names, shapes, features."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import open_clip  # type: ignore[import-untyped]
import pytest
import timm
import torch
from helpers.cases import slow_except
from helpers.hf_models import VOCABULARY, save_config
from helpers.open_clip_models import built, check_features, filled
from open_clip.coca_model import CoCa  # type: ignore[import-untyped]
from torch import nn

from clipx.model.clip import SkipDraws
from clipx.weights.open_clip import NOT_IN_MODEL, config_of, from_open_clip, spec_of, to_open_clip

META, CPU = torch.device("meta"), torch.device("cpu")
REFUSED = {
    # Captioning models whose image tower has no attentional pool, which gives CoCa's image embedding.
    "coca_base": r"^vision_cfg\.attentional_pool=False in the configuration has no counterpart",
    "coca_roberta-ViT-B-32": r"^vision_cfg\.attentional_pool=False in the configuration has no counterpart",
}
READ = sorted(set(open_clip.list_models()) - REFUSED.keys())
QUICK = ("EVA02-B-16", "MobileCLIP-S1", "roberta-ViT-B-32")  # not marked slow
HF_TYPES = {  # repository of the text tower -> model of tests/helpers/hf_models.py
    "roberta-base": "roberta",
    "xlm-roberta-base": "xlm-roberta",
    "xlm-roberta-large": "xlm-roberta",
    "google/mt5-base": "mt5",
    "google/mt5-xl": "mt5",
    "facebook/nllb-200-distilled-600M": "m2m_100",
    "facebook/nllb-200-distilled-1.3B": "m2m_100",
}
_CUTS: dict[str, dict[str, Any]] = {  # beginning of the name of a timm model -> arguments that leave few blocks
    "convnext": {"depths": (1, 1, 1, 1)},
    "swin": {"depths": (1, 1, 2, 1)},
    "fastvit_mci3": {"layers": (1, 1, 1, 1, 1)},
    "fastvit_mci4": {"layers": (1, 1, 1, 1, 1)},
    "fastvit": {"layers": (1, 1, 1, 1)},
    "resnet": {},
    "": {"depth": 2},
}


@pytest.fixture(autouse=True)
def _few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds the models of timm with few blocks, in open_clip and in clipx."""
    create = timm.create_model

    def cut(name: str, **options: Any) -> nn.Module:
        fewer = next(found for prefix, found in _CUTS.items() if name.startswith(prefix))
        return create(name, **(fewer | options))

    monkeypatch.setattr(timm, "create_model", cut)


def config(name: str, folder: Path) -> dict[str, Any]:
    """Returns a configuration of open_clip with two layers in each tower of its own.

    A text tower of transformers is a small one of the same type.
    """
    found: dict[str, Any] = deepcopy(open_clip.get_model_config(name))
    vision, text = found["vision_cfg"], found["text_cfg"]
    if isinstance(vision.get("layers"), int):
        vision["layers"], vision["image_size"] = 2, 4 * vision["patch_size"]
    for part in (text, found.get("multimodal_cfg", text)):
        part["layers"] = 2
    if "hf_tokenizer_name" in text:
        text["vocab_size"] = VOCABULARY
    if "hf_model_name" in text:
        text["hf_model_name"] = text["hf_tokenizer_name"] = save_config(folder, HF_TYPES[text["hf_model_name"]])
        text["hf_model_pretrained"] = False
        found["custom_text"] = True  # as open_clip's factory does
    return found


def model_of(found: dict[str, Any]) -> nn.Module:
    """Builds open_clip's model on the current default device."""
    with SkipDraws():
        if "multimodal_cfg" in found:
            return CoCa(**{key: deepcopy(value) for key, value in found.items() if key != "custom_text"}).eval()
        return built(found)


def shapes(state: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in state.items() if key not in NOT_IN_MODEL}


_SIZE = r"_?(tiny|small|medium|base|large2?|xlarge|xxlarge|so400m|giantopt|giant|gigantic|enormous|patch\d+|\d+)(?=_|$)"
_SIZES = (
    *("image_size", "patch_size", "width", "head_width", "mlp_ratio", "layers", "heads", "attn_pooler_heads"),
    *("vocab_size", "context_length", "hf_tokenizer_name", "hf_model_name", "eos_id"),
)


def form(name: str) -> str:
    """Returns what distinguishes a configuration from others beyond the sizes of its layers."""
    found = open_clip.get_model_config(name)
    vision, text = ({k: v for k, v in found[part].items() if k not in _SIZES} for part in ("vision_cfg", "text_cfg"))
    vision["timm_model_name"] = re.sub(_SIZE, "", vision.get("timm_model_name", ""))
    vision["resnet"] = len(found["vision_cfg"]["layers"]) if isinstance(found["vision_cfg"].get("layers"), list) else 0
    kind = HF_TYPES.get(found["text_cfg"].get("hf_model_name"), found["text_cfg"].get("hf_tokenizer_name") is None)
    return repr([vision, text, found.get("quick_gelu"), kind, "multimodal_cfg" in found])


def size(name: str) -> tuple[int, str]:
    """Returns what orders configurations of one form by their cost."""
    layers, width = (open_clip.get_model_config(name)["vision_cfg"].get(key, 0) for key in ("layers", "width"))
    return (sum(layers) if isinstance(layers, list) else width), name


# The smallest of each form.
FORMS = {form(name): name for name in sorted(READ, key=size, reverse=True)}


@pytest.mark.parametrize("name", slow_except(sorted(FORMS.values()), *QUICK))
def test_names_shapes_and_features_of_each_form_equal_open_clip(name: str, tmp_path: Path) -> None:
    found = config(name, tmp_path)
    twin = filled(model_of(found))
    spec = spec_of(found, name)
    with SkipDraws():
        model = spec.build(CPU, torch.float32).eval()
    model.load_state_dict(from_open_clip(spec, twin.state_dict()))
    if "multimodal_cfg" not in found:
        check_features(model, twin)
    back = to_open_clip(spec, model.state_dict())
    assert all(torch.equal(back[key], tensor) for key, tensor in twin.state_dict().items() if key in back)
    written = config_of(spec)
    assert config_of(spec_of(written, name)) == written
    with META:
        again = model_of(written).state_dict()
    assert shapes(back) == shapes(again)
