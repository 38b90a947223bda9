"""Configurations that open_clip ships, one of each form, with few blocks: names, shapes, features."""

from __future__ import annotations

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
QUICK = ("EVA02-B-16", "MobileCLIP-S1", "roberta-ViT-B-32")  # not marked slow
# The smallest configuration of each form; those of one form differ in the sizes of their layers.
FORMS = """
EVA01-g-14 EVA02-B-16 MobileCLIP-B MobileCLIP-S1 MobileCLIP2-L-14 PE-Core-B-16 RN50 RN50-quickgelu ViT-B-16-SigLIP
ViT-B-16-SigLIP2 ViT-B-16-quickgelu ViT-H-14-worldwide ViT-H-14-worldwide-quickgelu ViT-L-14-CLIPA ViT-L-14-worldwide
ViT-L-14-worldwide-quickgelu ViT-M-16-alt ViT-S-16 ViT-SO400M-16-SigLIP-i18n-256 ViTamin-B coca_ViT-B-32 convnext_base
convnext_large_d mt5-base-ViT-B-32 nllb-clip-base nllb-clip-base-siglip roberta-ViT-B-32 swin_base_patch4_window7_224
vit_medium_patch16_gap_256 vit_relpos_medium_patch16_cls_224 xlm-roberta-base-ViT-B-32
""".split()
HF_TYPES = {  # repository of the text tower -> model of tests/helpers/hf_models.py
    "roberta-base": "roberta",
    "xlm-roberta-base": "xlm-roberta",
    "google/mt5-base": "mt5",
    "facebook/nllb-200-distilled-600M": "m2m_100",
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


@pytest.mark.parametrize("name", slow_except(FORMS, *QUICK))
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
