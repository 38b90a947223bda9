"""Conversion between clipx and open_clip: parameter names, configurations and features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases import slow_except
from helpers.hf_models import PACKED, VOCABULARY, save_config
from helpers.open_clip_models import PUBLISHED, SMALL, built, check_features, published, trained
from helpers.runs import compose
from torch import nn

from clipx.errors import CheckpointError
from clipx.model.clip import CLIP
from clipx.model.spec import ModelSpec
from clipx.weights.open_clip import NOT_IN_MODEL, config_of, from_open_clip, spec_of, to_open_clip

META, CPU = torch.device("meta"), torch.device("cpu")


def ours(spec: ModelSpec, twin: nn.Module) -> CLIP:
    """Returns clipx's model with the weights of open_clip's model."""
    model = spec.build(CPU, torch.float32)
    model.load_state_dict(from_open_clip(spec, twin.state_dict()))
    return model.eval()


# ----------------------------------------------------------------------------------------------- small models


@pytest.mark.parametrize("name", SMALL)
def test_features_equal_open_clip(name: str) -> None:
    twin = trained(SMALL[name])
    check_features(ours(spec_of(SMALL[name], name), twin), twin)


@pytest.mark.parametrize("name", ["vit", "siglip", "averaged", "classifier"])
def test_weights_and_configuration_survive_a_round_trip(name: str) -> None:
    spec = spec_of(SMALL[name], name)
    twin = trained(SMALL[name])
    state = {key: tensor for key, tensor in twin.state_dict().items() if key not in NOT_IN_MODEL}
    back = to_open_clip(spec, from_open_clip(spec, twin.state_dict()))
    again = built(config_of(spec))
    wanted = {**state, "logit_scale": torch.tensor(1.0)}
    if config_of(spec).get("custom_text") == SMALL[name].get("custom_text"):
        assert back.keys() == state.keys()
        assert all(torch.equal(back[key], state[key]) for key in state)
    else:  # CLIP's built-in text tower: open_clip reads its names with and without the prefix `text.`
        wanted = {**back, "logit_scale": torch.tensor(1.0)}
    assert all(tensor.is_contiguous() for tensor in back.values())
    again.load_state_dict(wanted)
    check_features(ours(spec, twin), again)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("roberta", {}),
        ("m2m_100", {"hf_proj_type": "linear", "hf_pooler_type": "cls_pooler"}),
    ],
)
def test_a_text_tower_of_transformers_equals_open_clip(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = save_config(tmp_path, name)
    text = {"hf_model_name": folder, "hf_model_pretrained": False, "hf_tokenizer_name": folder, **options}
    config = {"embed_dim": 24, "custom_text": True, "text_cfg": text, "vision_cfg": SMALL["vit"]["vision_cfg"]}
    twin = trained(config)
    spec = spec_of(config, name)
    assert spec.text.packed == (name in PACKED)
    model = ours(spec, twin)
    tokens_BL = torch.randint(5, VOCABULARY, (3, 77))
    tokens_BL[0, 4:], tokens_BL[1, 76:] = 1, 1
    with torch.no_grad():
        expected_BD = twin.encode_text(tokens_BL, normalize=True)
        torch.testing.assert_close(model.encode_text(tokens_BL), expected_BD, atol=1e-5, rtol=0)
    back = to_open_clip(spec, model.state_dict())
    assert back.keys() == twin.state_dict().keys() - {*NOT_IN_MODEL}
    again = built(config_of(spec))
    again.load_state_dict({**back, "logit_scale": torch.tensor(1.0)})
    with torch.no_grad():
        torch.testing.assert_close(again.encode_text(tokens_BL, normalize=True), expected_BD)


# ----------------------------------------------------------------------------------------- published models


@pytest.mark.parametrize("name", slow_except(PUBLISHED, "rn50", "vit_b32", "vit_b16_siglip", "convnext_base_w"))
def test_configurations_of_published_models_equal_open_clip(name: str) -> None:
    spec, config = compose(f"model={name}").model, published(name)
    config.pop("init_logit_bias", None)  # belongs to the objective
    config["vision_cfg"].pop("timm_drop", None)  # belongs to training
    assert config_of(spec) == config
    assert config_of(spec_of(published(name), name)) == config


# ---------------------------------------------------------------------------------------- conversion and errors


def varied_config(part: str, key: str, value: Any) -> dict[str, Any]:
    return {**SMALL["vit"], part: {**SMALL["vit"][part], key: value}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            varied_config("vision_cfg", "qk_norm", True),
            r"vision_cfg\.qk_norm=True in the configuration has no counterpart",
        ),
        (varied_config("text_cfg", "layers", 10**7), r"model.text.layers=10000000 is above the limit of 1,000 layers"),
        ({**SMALL["vit"], "novelty": 1}, r"^novelty=1 in the configuration has no counterpart"),
    ],
)
def test_a_configuration_key_without_a_counterpart_raises_an_error(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of(config, "small")
