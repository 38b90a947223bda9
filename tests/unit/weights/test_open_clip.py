"""Conversion between clipx and open_clip: features and configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.cases import slow_except
from helpers.open_clip_models import PUBLISHED, SMALL, check_features, published, trained
from helpers.runs import compose
from torch import nn

from clipx.errors import CheckpointError
from clipx.model.clip import CLIP
from clipx.model.spec import ModelSpec
from clipx.weights.open_clip import config_of, from_open_clip, spec_of

CPU = torch.device("cpu")


def ours(spec: ModelSpec, twin: nn.Module) -> CLIP:
    """Returns clipx's model with the weights of open_clip's model."""
    model = spec.build(CPU, torch.float32)
    model.load_state_dict(from_open_clip(spec, twin.state_dict()))
    return model.eval()


@pytest.mark.parametrize("name", SMALL)
def test_features_equal_open_clip(name: str) -> None:
    twin = trained(SMALL[name])
    check_features(ours(spec_of(SMALL[name], name), twin), twin)


@pytest.mark.parametrize("name", slow_except(PUBLISHED, "rn50", "vit_b32", "vit_b16_siglip", "convnext_base_w"))
def test_configurations_of_published_models_equal_open_clip(name: str) -> None:
    spec, config = compose(f"model={name}").model, published(name)
    config.pop("init_logit_bias", None)  # belongs to the objective
    config["vision_cfg"].pop("timm_drop", None)  # belongs to training
    assert config_of(spec) == config
    assert config_of(spec_of(published(name), name)) == config


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
