"""A model of stored features: its embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from helpers.runs import compose
from torch import nn

from clipx.optimizer.groups import parameter_groups

MODEL = ("model=stored_features", "model.image.features=24", "model.embed_dim=16")
CPU = torch.device("cpu")


def model(*overrides: str, dtype: torch.dtype = torch.float64):  # type: ignore[no-untyped-def]
    return compose(*MODEL, *overrides).model.build(CPU, dtype)


def test_the_embedding_is_the_unit_projection_of_the_features() -> None:
    torch.manual_seed(0)
    clip = model()
    stored_BF = torch.randn(5, 24, dtype=torch.float64)
    expected = torch.stack([clip.image.projection.weight @ row for row in stored_BF])
    torch.testing.assert_close(clip.encode_image(stored_BF), F.normalize(expected, dim=-1), rtol=0, atol=1e-12)
    tokens = torch.randint(1, 40_000, (5, 16))
    image_BD, text_BD = clip(stored_BF, tokens)
    assert torch.equal(image_BD, clip.encode_image(stored_BF)) and torch.equal(text_BD, clip.encode_text(tokens))
    assert model(dtype=torch.bfloat16).encode_image(torch.randn(2, 24)).dtype == torch.float32


def test_without_projection_the_embedding_is_the_unit_features_and_has_no_parameters() -> None:
    spec = compose(*MODEL, "model.image.features=16", "model.image.projection=none")
    clip = spec.model.build(CPU, torch.float64)
    stored_BF = torch.randn(3, 16, dtype=torch.float64)
    torch.testing.assert_close(clip.encode_image(stored_BF), F.normalize(stored_BF, dim=-1), rtol=0, atol=1e-12)
    assert not [name for name, _ in clip.named_parameters() if name.startswith("image.")]
    assert parameter_groups(clip, nn.Module(), spec.optimizer)
