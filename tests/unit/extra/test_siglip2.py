"""Weights of SigLIP 2 NaFlex against transformers' Siglip2Model with random weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hf_models import save_tokenizer
from helpers.runs import compose
from helpers.samples import encode, picture
from transformers import Siglip2Config, Siglip2Model
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from clipx.data.images import reader_of
from clipx.weights.load import load_model

SIZES = [(400, 300), (60, 200), (224, 224), (31, 17), (640, 90)]
VISION = {
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 8,
    "num_patches": 36,
}
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
    "projection_size": 48,
}
CPU = torch.device("cpu")


def build(vision: dict[str, Any], text: dict[str, Any]) -> Siglip2Model:
    torch.manual_seed(0)
    model = Siglip2Model(Siglip2Config(vision_config=vision, text_config=text))
    with torch.no_grad():  # the biases of transformers' initialization are 0
        for name, parameter in model.named_parameters():
            if name not in ("logit_scale", "logit_bias"):
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.logit_scale.fill_(3.2)
        model.logit_bias.fill_(-7.5)
    return model.eval()


@pytest.mark.parametrize("act", [{}, {"hidden_act": "gelu"}], ids=["tanh", "exact"])
def test_features_equal_those_of_transformers(act: dict[str, str], tmp_path: Path) -> None:
    """Compares the way from encoded images of any aspect ratio, and token ids, to embeddings: to 1e-5."""
    theirs = build({**VISION, **act}, {**TEXT, **act})
    theirs.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    weights, spec, ours = load_model(str(tmp_path), "run", CPU, torch.float32)
    assert (weights.log_scale, weights.bias) == (pytest.approx(3.2), pytest.approx(-7.5))
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    inputs = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=36)(images=pictures, return_tensors="pt")
    view = reader_of(spec.image, compose().data)
    rows_BRX = torch.stack([view.load_for_evaluation(encode(image, "PNG")) for image in pictures])
    drawn = random.Random(0)
    tokens_BL = torch.tensor([[drawn.randrange(64) for _ in range(12)] for _ in SIZES])
    with torch.inference_mode():
        expected = theirs(input_ids=tokens_BL, **inputs)
        image_BD, text_BD = ours(rows_BRX, tokens_BL)
    assert image_BD.std() > 0.01 and text_BD.std() > 0.01
    torch.testing.assert_close(image_BD, expected.image_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(text_BD, expected.text_embeds, atol=1e-5, rtol=0)
