"""All configurations that the installed open_clip ships: names, shapes, features and the way back."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import open_clip  # type: ignore[import-untyped]
import pytest
import torch
from helpers.cases import slow_except
from helpers.hf_models import save_config
from helpers.open_clip_models import built
from open_clip.coca_model import CoCa  # type: ignore[import-untyped]
from torch import nn

from clipx.errors import CheckpointError
from clipx.model.uninitialized import SkipDraws
from clipx.weights.open_clip import NOT_IN_MODEL, config_of, from_open_clip, spec_of, to_open_clip

META, CPU = torch.device("meta"), torch.device("cpu")
REFUSED = {
    # A text decoder over the features of all patches, without the pool that gives CoCa's image embedding.
    "coca_base": r"^vision_cfg\.attentional_pool=False in the configuration has no counterpart",
    "coca_roberta-ViT-B-32": r"^vision_cfg\.attentional_pool=False in the configuration has no counterpart",
}
READ = sorted(set(open_clip.list_models()) - REFUSED.keys())
HF_TYPES = {  # repository of the text tower -> model of tests/helpers/hf_models.py
    "roberta-base": "roberta",
    "xlm-roberta-base": "xlm-roberta",
    "xlm-roberta-large": "xlm-roberta",
    "google/mt5-base": "mt5",
    "google/mt5-xl": "mt5",
    "facebook/nllb-200-distilled-600M": "m2m_100",
    "facebook/nllb-200-distilled-1.3B": "m2m_100",
}
QUICK = ("ViT-B-16", "ViT-L-14-CLIPA", "ViT-B-16-SigLIP2", "EVA02-B-16", "MobileCLIP-S1")  # not marked slow


def config(name: str, folder: Path) -> dict[str, Any]:
    """Returns a configuration of open_clip, whose text tower of transformers is a small one of the same type."""
    found: dict[str, Any] = deepcopy(open_clip.get_model_config(name))
    text = found["text_cfg"]
    if "hf_model_name" in text:
        text["hf_model_name"] = text["hf_tokenizer_name"] = save_config(folder, HF_TYPES[text["hf_model_name"]])
        text["hf_model_pretrained"] = False
    return found


def model_of(found: dict[str, Any]) -> nn.Module:
    """Builds open_clip's model on the current default device."""
    with SkipDraws():
        return CoCa(**deepcopy(found)) if "multimodal_cfg" in found else built(found)


def shapes(state: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in state.items() if key not in NOT_IN_MODEL}


# --------------------------------------------------------------------------------------- all, in their full size


@pytest.mark.parametrize("name", slow_except(READ, *QUICK))
def test_a_configuration_is_read_with_the_names_and_shapes_of_open_clip(name: str, tmp_path: Path) -> None:
    found = config(name, tmp_path)
    spec = spec_of(found, name)
    with META:
        theirs = model_of(found).state_dict()
    mine = spec.build(META, torch.float32).state_dict()
    assert shapes(from_open_clip(spec, theirs, name)) == shapes(mine)
    back = config_of(spec)
    assert spec_of(back, name) == spec
    with META:
        again = model_of(back).state_dict()
    assert shapes(to_open_clip(spec, mine)) == shapes(again)
    assert sorted(shapes(again).values()) == sorted(shapes(theirs).values())


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_is_not_read_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[name]):
        spec_of(open_clip.get_model_config(name), name)
