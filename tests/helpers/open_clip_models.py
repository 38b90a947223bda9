"""Models of open_clip, built from its classes and configurations, with weights off their initial values."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import open_clip  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn

from clipx.model.clip import CLIP
from clipx.model.spec import ModelSpec
from clipx.model.text_spec import ClipTextSpec
from clipx.model.tokenizer import Tokenizer
from helpers.hf_models import VOCABULARY

CONTEXT = 12
_TEXT = {"context_length": CONTEXT, "width": 32, "heads": 2, "layers": 2}
_SIGLIP_TEXT = {
    "context_length": CONTEXT,
    "vocab_size": 99,
    "width": 32,
    "heads": 2,
    "layers": 2,
    "no_causal_mask": True,
    "hf_tokenizer_name": "timm/ViT-B-16-SigLIP",
    "tokenizer_kwargs": {"clean": "canonicalize"},
    "proj_bias": True,
    "pool_type": "last",
    "norm_kwargs": {"eps": 1e-6},
}
_VIT = {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8}


def timm_vision(name: str, size: int, pool: str, projection: str | None) -> dict[str, Any]:
    return {
        "timm_model_name": name,
        "timm_model_pretrained": False,
        "timm_pool": pool,
        "timm_proj": projection,
        "image_size": size,
    }


SMALL: dict[str, dict[str, Any]] = {
    "vit": {"embed_dim": 24, "vision_cfg": _VIT, "text_cfg": _TEXT},
    "vit_quickgelu": {"embed_dim": 24, "quick_gelu": True, "vision_cfg": _VIT, "text_cfg": _TEXT},
    "vit_g": {  # other heads and another MLP
        "embed_dim": 24,
        "vision_cfg": {**_VIT, "width": 88, "head_width": 44, "mlp_ratio": 4.3637, "ls_init_value": 0.1},
        "text_cfg": {**_TEXT, "mlp_ratio": 3.7362},
    },
    "convnext": {"embed_dim": 24, "vision_cfg": timm_vision("test_convnext", 64, "", "linear"), "text_cfg": _TEXT},
    "siglip": {
        "embed_dim": 64,
        "init_logit_bias": -10,
        "custom_text": True,
        "text_cfg": _SIGLIP_TEXT,
        "vision_cfg": timm_vision("test_vit", 160, "map", "none"),
    },
    "siglip2": {
        "embed_dim": 64,
        "init_logit_bias": -10,
        "custom_text": True,
        "text_cfg": {**_SIGLIP_TEXT, "act_kwargs": {"approximate": "tanh"}},
        "vision_cfg": timm_vision("test_vit", 160, "map", "none"),
    },
    "siglip_i18n": {  # the pooled features are the embedding
        "embed_dim": 32,
        "init_logit_bias": -10,
        "custom_text": True,
        "text_cfg": {**_SIGLIP_TEXT, "proj_bias": False, "proj_type": "none"},
        "vision_cfg": {**_VIT, "ls_init_value": 0.1},
    },
    "clipa": {
        "embed_dim": 24,
        "custom_text": True,
        "vision_cfg": {**_VIT, "no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True},
        "text_cfg": {
            **_TEXT,
            "vocab_size": 99,
            "hf_tokenizer_name": "bert-base-uncased",
            "tokenizer_kwargs": {"clean": "whitespace", "strip_sep_token": True},
            "pool_type": "last",
            "no_causal_mask": True,
        },
    },
    "averaged": {  # the norm before the average, which is that of CLIP's ViT
        "embed_dim": 24,
        "vision_cfg": {**_VIT, "pool_type": "avg"},
        "text_cfg": _TEXT,
    },
    "worldwide": {  # pooled at the end token of another tokenizer
        "embed_dim": 24,
        "vision_cfg": _VIT,
        "text_cfg": {
            **_TEXT,
            "vocab_size": 99,
            "hf_tokenizer_name": "facebook/xlm-v-base",
            "tokenizer_kwargs": {"clean": "whitespace"},
            "pool_type": "eos",
            "eos_id": 2,
        },
    },
    "convnext_mlp": {"embed_dim": 24, "vision_cfg": timm_vision("test_convnext", 64, "", "mlp"), "text_cfg": _TEXT},
    "classifier": {  # timm's classifier, used as the projection
        "embed_dim": 24,
        "custom_text": True,
        "text_cfg": _TEXT,
        "vision_cfg": timm_vision("test_vit", 160, "token", None),
    },
}
PUBLISHED = {  # clipx's option -> open_clip's name
    "rn50": "RN50",
    "vit_s16": "ViT-S-16",
    "vit_b32": "ViT-B-32",
    "vit_b32_quickgelu": "ViT-B-32-quickgelu",
    "vit_l14": "ViT-L-14",
    "convnext_base_w": "convnext_base_w",
    "vit_b16_siglip": "ViT-B-16-SigLIP",
}


def published(name: str) -> dict[str, Any]:
    """Returns the configuration that open_clip ships."""
    config: dict[str, Any] = open_clip.get_model_config(PUBLISHED[name])
    return config


def built(config: dict[str, Any]) -> nn.Module:
    """Builds the model on the current default device, as open_clip does."""
    config = deepcopy(config)
    cls = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
    model: nn.Module = cls(**config)
    return model.eval()


def trained(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """Builds a model with every parameter and every running average moved off its initial value."""
    torch.manual_seed(seed)
    model = built(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and tensor.ndim:
                moved = torch.randn_like(tensor) * 0.02
                tensor.add_(moved.abs() if "running_var" in name else moved)
    return model


@torch.no_grad()
def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draws every parameter and running average of a model at random, of an order at which no layer vanishes."""
    torch.manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.ndim:
            if tensor.ndim > 1:
                tensor.normal_(std=tensor[0].numel() ** -0.5)
            else:
                tensor.normal_(std=0.1)
                tensor.add_(1.0 if name.endswith(("weight", "running_var", "gamma")) else 0.0)
            if "running_var" in name:
                tensor.abs_()
    return model


@torch.no_grad()
def features(model: nn.Module, pixels_BCSS: Tensor, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Returns image and text features of open_clip's model for normalised pixels."""
    return model.encode_image(pixels_BCSS, normalize=True), model.encode_text(tokens_BL, normalize=True)


TEXTS = ["a photo of a cat", "two dogs", ""]


def tokens_of(spec: ModelSpec) -> Tensor:
    if spec.text.tokenizer_place == "clip":
        return Tokenizer(spec.text.context_length)(TEXTS)
    text, generator = spec.text, torch.Generator().manual_seed(0)
    vocabulary = text.vocabulary if isinstance(text, ClipTextSpec) else VOCABULARY
    tokens_BL = torch.randint(5, vocabulary, (3, text.context_length), generator=generator)
    if text.end_id is not None or not isinstance(text, ClipTextSpec):
        for row, used in enumerate((2, 5, text.context_length)):
            tokens_BL[row, used - 1], tokens_BL[row, used:] = 2 if text.end_id is None else text.end_id, 1
    return tokens_BL


def check_features(model: CLIP, twin: nn.Module, tolerance: float = 1e-5) -> None:
    spec = model.spec
    torch.manual_seed(3)
    image_BCSS, tokens_BL = torch.rand(3, 3, spec.image.size, spec.image.size), tokens_of(spec)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in spec.image.normalization.values())
    with torch.no_grad():
        found = model(image_BCSS, tokens_BL)
    for mine, theirs in zip(found, features(twin, (image_BCSS - mean) / std, tokens_BL), strict=True):
        assert mine.std() > 1e-3
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)
