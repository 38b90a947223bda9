"""The text tower: CLIP's initialization, packed texts."""

from __future__ import annotations

import pytest
import torch

from clipx.model.text import TextTower
from clipx.model.text_spec import ClipTextSpec
from clipx.model.tokenizer import Tokenizer

WIDTH, DEPTH, LENGTH = 192, 3, 10
TEXTS = [
    "a photo of a cat",
    "",
    "two dogs",
    "one two three four five six seven eight nine ten",
    "a red house by the lake",
]


def build(packed: bool) -> TextTower:
    torch.manual_seed(0)
    spec = ClipTextSpec(context_length=LENGTH, width=WIDTH, heads=3, layers=DEPTH, packed=packed)
    return TextTower(spec, 64, quick_gelu=False)


@pytest.fixture(scope="module")
def tower() -> TextTower:
    return build(packed=True)


@pytest.mark.parametrize(
    ("suffix", "std"),
    [
        ("token_embedding.weight", 0.02),
        ("positional_embedding", 0.01),
        ("attn.qkv.weight", WIDTH**-0.5),
        ("attn.proj.weight", WIDTH**-0.5 * (2 * DEPTH) ** -0.5),
        ("mlp.fc1.weight", (2 * WIDTH) ** -0.5),
        ("mlp.fc2.weight", WIDTH**-0.5 * (2 * DEPTH) ** -0.5),
        ("projection.weight", WIDTH**-0.5),
    ],
)
def test_initial_weights_are_normal_with_the_stds_of_clip(tower: TextTower, suffix: str, std: float) -> None:
    found = [p for name, p in tower.named_parameters() if name.endswith(suffix)]
    assert len(found) in (1, DEPTH)
    for weight in found:
        tolerance = 4 / (2 * weight.numel()) ** 0.5  # four standard errors of the estimate
        assert weight.std().item() == pytest.approx(std, rel=tolerance)
        assert abs(weight.mean().item()) < 4 * std / weight.numel() ** 0.5
        assert weight.abs().max() > 2.5 * std  # a uniform distribution ends at 1.7 std


def test_packed_and_padded_texts_have_equal_features_and_gradients() -> None:
    tokens_BL = Tokenizer(LENGTH)(TEXTS)
    found = []
    for tower in (build(True).double(), build(False).double()):
        features_BD = tower(tokens_BL)
        features_BD.square().mean().backward()
        found.append({"features": features_BD.detach(), **{n: p.grad for n, p in tower.named_parameters()}})
    for name, padded in found[1].items():
        assert padded is not None
        assert padded.any()
        assert (found[0][name] - padded).abs().max() <= 1e-12 * padded.abs().max(), name
