"""Loading pretrained weights into a model and an objective: interpolation, temperature and bias."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.open_clip_models import SMALL, built, check_features, trained
from helpers.runs import compose
from open_clip.factory import load_checkpoint  # type: ignore[import-untyped]
from safetensors.torch import save_file
from torch import nn

from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.objective.base import Objective
from clipx.weights.load import CONFIG, load_into, load_weights
from clipx.weights.open_clip import spec_of

CPU = torch.device("cpu")
VIT = SMALL["vit"]


def write_folder(folder: Path, twin: nn.Module, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"model_cfg": config}))
    save_file({name: t.contiguous() for name, t in twin.state_dict().items()}, folder / "open_clip_model.safetensors")
    return folder


def config_of_size(size: int) -> dict[str, Any]:
    return {**VIT, "vision_cfg": {**VIT["vision_cfg"], "image_size": size}}


def test_features_at_another_image_size_equal_open_clip(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", trained(VIT), VIT)
    model = spec_of(config_of_size(48), "vit").build(CPU, torch.float32)
    notes = load_into(model, load_weights(str(folder)))
    assert notes == ["image.trunk.pos_embed was interpolated from 4x4 positions to 6x6"]
    twin = built(config_of_size(48))
    load_checkpoint(twin, str(folder / "open_clip_model.safetensors"))
    check_features(model.eval(), twin)


def objective(*overrides: str) -> Objective:
    spec = compose(*overrides).objective
    return spec.build(Comm(0, 1, 0, CPU), Length(10_000, 8))


@pytest.mark.parametrize("name", ["infonce", "fastclip_v3"])
def test_a_learned_temperature_starts_from_the_weights(name: str) -> None:
    made = objective(f"objective={name}")
    told = made.adopt_scale(math.log(1 / 0.02), None)
    assert made.get_parameter("temperature.log_scale").item() == pytest.approx(math.log(50))
    assert told == ["initial temperature 0.02, from the weights"]
