"""Conversion between clipx and open_clip: features and configurations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.open_clip_models import PUBLISHED, SMALL, built, check_features, published, trained
from helpers.runs import compose
from open_clip.factory import load_checkpoint  # type: ignore[import-untyped]
from safetensors.torch import save_file
from torch import nn

from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError
from clipx.model.clip import CLIP
from clipx.model.spec import ModelSpec
from clipx.weights.formats import CONFIG
from clipx.weights.load import load_into, load_weights
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


def test_a_configuration_key_without_a_counterpart_raises_an_error() -> None:
    config = {**SMALL["vit"], "vision_cfg": {**SMALL["vit"]["vision_cfg"], "qk_norm": True}}
    with pytest.raises(CheckpointError, match=r"vision_cfg\.qk_norm=True in the configuration has no counterpart"):
        spec_of(config, "small")


def test_features_at_another_image_size_equal_open_clip(tmp_path: Path) -> None:
    config, twin = SMALL["vit"], trained(SMALL["vit"])
    (tmp_path / CONFIG).write_text(json.dumps({"model_cfg": config}))
    weights = tmp_path / "open_clip_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in twin.state_dict().items()}, weights)
    larger = {**config, "vision_cfg": {**config["vision_cfg"], "image_size": 48}}
    model = spec_of(larger, "vit").build(CPU, torch.float32)
    notes = load_into(model, load_weights(str(tmp_path)))
    assert notes == ["image.trunk.pos_embed was interpolated from 4x4 positions to 6x6"]
    twin = built(larger)
    load_checkpoint(twin, str(weights))
    check_features(model.eval(), twin)


@pytest.mark.parametrize("name", ["infonce", "siglip"])
def test_a_learned_temperature_and_bias_start_from_the_weights(name: str) -> None:
    made = compose(f"objective={name}").objective.build(Comm(0, 1, 0, CPU), Length(10_000, 8))
    made.adopt_scale(math.log(1 / 0.02), -12.5)
    assert made.get_parameter("temperature.log_scale").item() == pytest.approx(math.log(50))
    assert name == "infonce" or made.get_parameter("bias").item() == -12.5
