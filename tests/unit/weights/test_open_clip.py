"""Conversion between clipx and open_clip: parameter names, configurations and features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases import slow_except
from helpers.hf_models import PACKED, VOCABULARY, save_config
from helpers.open_clip_models import CONTEXT, PUBLISHED, SMALL, built, check_features, published, trained
from helpers.runs import compose
from torch import nn

from clipx.errors import CheckpointError
from clipx.model.clip import CLIP
from clipx.model.flops import ForwardFlops
from clipx.model.spec import ClipSpec, ModelSpec
from clipx.weights.open_clip import NOT_IN_MODEL, config_of, from_open_clip, spec_of, ties, to_open_clip

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


def test_a_timm_vit_wrapped_by_open_clip_loads_with_the_same_spec() -> None:
    name = "vit_base_patch32_clip_224"
    vision = {"timm_model_name": name, "timm_pool": "token", "timm_proj": "linear", "image_size": 224}
    text = {"context_length": CONTEXT, "width": 32, "heads": 2, "layers": 2}
    wrapped, native = (
        {"embed_dim": 24, "vision_cfg": vision, "text_cfg": text},
        spec_of({"embed_dim": 24, "vision_cfg": {"patch_size": 32}, "text_cfg": text}, "native"),
    )
    with META:
        found = from_open_clip(native, built(wrapped).state_dict())
        assert found.keys() == native.build(META, torch.float32).state_dict().keys()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("roberta", {}),
        ("xlm-roberta", {"hf_proj_type": "linear"}),
        ("mt5", {"hf_pooler_type": "mean_pooler"}),
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


def test_optimizer_moments_convert_like_their_tensors() -> None:
    spec = spec_of(SMALL["vit"], "vit")
    state = spec.build(CPU, torch.float32).state_dict()
    theirs = to_open_clip(spec, state)
    for tie in ties(spec, state):
        moment = torch.randn_like(state[tie.ours])
        assert tie.to_theirs(moment).shape == theirs[tie.theirs].shape
        assert torch.equal(tie.to_ours(tie.to_theirs(moment)), moment)


def test_missing_and_unexpected_tensors_are_listed() -> None:
    spec = spec_of(SMALL["vit"], "small")
    state = built(SMALL["vit"]).state_dict()
    state["visual.other"] = state.pop("visual.conv1.weight")
    with pytest.raises(
        CheckpointError, match=r"do not fit model small: missing visual\.conv1\.weight; unexpected visual"
    ):
        from_open_clip(spec, state)


def varied_config(part: str, key: str, value: Any) -> dict[str, Any]:
    return {**SMALL["vit"], part: {**SMALL["vit"][part], key: value}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            varied_config("text_cfg", "embed_cls", True),
            r"text_cfg\.embed_cls=True in the config",
        ),
        (
            varied_config("text_cfg", "pool_type", "eos"),
            r"text_cfg\.pool_type=eos in the configuration has no counterpart",
        ),
        (varied_config("vision_cfg", "pool_type", "none"), r"vision_cfg\.pool_type=none in the configuration has no"),
        (
            varied_config("vision_cfg", "qk_norm", True),
            r"vision_cfg\.qk_norm=True in the configuration has no counterpart",
        ),
        (
            varied_config("vision_cfg", "image_size", [32, 64]),
            r"vision_cfg\.image_size=\[32, 64\] in the configuration has no",
        ),
        (
            varied_config("vision_cfg", "width", "wide"),
            r"^the configuration of small is not a configuration of open_clip \(",
        ),
        (varied_config("vision_cfg", "timm_model_name", "hf-hub:org/name"), r"=hf-hub:org/name is not a model of timm"),
        (
            varied_config("vision_cfg", "layers", 10**7),
            r"^the configuration of small describes no model of clipx: model.image.options.depth=10000000 is above",
        ),
        (varied_config("text_cfg", "layers", 10**7), r"model.text.layers=10000000 is above the limit of 1,000 layers"),
        ({**SMALL["vit"], "novelty": 1}, r"^novelty=1 in the configuration has no counterpart"),
        ({"embed_dim": 3, "vision_cfg": {}}, r"^text_cfg is missing in the configuration"),
        ({**SMALL["vit"], "vision_cfg": 3}, r"^vision_cfg is 3, not a mapping"),
    ],
)
def test_a_configuration_key_without_a_counterpart_raises_an_error(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of(config, "small")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.image.timm=convnext_atto", "+model.image.options={ls_init_value:1.0}"), "model.image.options="),
        (
            ("model.image.timm=vit_base_patch16_siglip_224", "model.image.size=256"),
            "builds vit_base_.* for 224 pixels only",
        ),
        (("model.image.timm=vit_base_patch32_clip_quickgelu_224",), "model.quick_gelu=false: open_clip has one activ"),
        (
            ("model.image.timm=vit_base_patch16_siglip_224", "model.quick_gelu=true"),
            "does not support for a tower from timm",
        ),
    ],
)
def test_a_model_without_an_open_clip_configuration_raises_an_error(overrides: tuple[str, ...], message: str) -> None:
    spec = compose("model=vit_b32", *overrides).model
    assert isinstance(spec, ClipSpec)
    with pytest.raises(CheckpointError, match=f"^open_clip has no configuration for this model: .*{message}"):
        config_of(spec)


def test_flops_of_an_attention_pooled_tower_are_counted() -> None:
    flops = ForwardFlops.of(compose("model=vit_b16_siglip").model)
    assert flops.image == pytest.approx(35.9e9, rel=0.05)  # 196 positions: 2 · 85.8e6 · 196, plus attention and pool
