"""A model of stored features: embeddings, options, FLOPs, and errors for what needs images."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.runs import compose
from torch import nn

from clipx.errors import CheckpointError
from clipx.model.features import FeatureTower
from clipx.model.flops import ForwardFlops
from clipx.model.layers import blocks_above, hidden_matrices, parameter_layers
from clipx.model.tower_spec import ImageTowerSpec
from clipx.optimizer.groups import parameter_groups
from clipx.weights.compare import check_same
from clipx.weights.open_clip import config_of

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


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (torch.zeros(2, 23), r"stored features have shape \[2, 23\], must be \[B, 24\]: "),
        (torch.zeros(2, 3, 8, 8), r"stored features have shape \[2, 3, 8, 8\], must be \[B, 24\]: "),
        (torch.zeros(2, 24, dtype=torch.int64), r"stored features are torch\.int64, must be floating point: convert"),
    ],
)
def test_other_inputs_are_rejected(stored: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        model().encode_image(stored)


def test_the_tower_is_a_projection_above_all_blocks_initialized_as_that_of_an_image_tower() -> None:
    torch.manual_seed(0)
    weight = FeatureTower(ImageTowerSpec(features=400), 300).projection.weight
    assert weight.shape == (300, 400)
    assert weight.std().item() == pytest.approx(400**-0.5, rel=0.01) and abs(weight.mean()) < 1e-3
    clip, stored_BF = model(), torch.randn(2, 24, dtype=torch.float64)
    assert clip.positional_embeddings() == {"text.positional_embedding"} and clip.class_tokens() == set()
    assert not clip.image.takes_pixels and clip.trunk_width == 24
    assert torch.equal(clip.encode_trunk(stored_BF), stored_BF)
    layer, top = parameter_layers(clip, "optimizer=muon")["image.projection.weight"]
    assert layer == top, "not a hidden matrix"
    assert blocks_above(clip, "optimizer.layer_decay")["image.projection.weight"] == 0
    hidden = hidden_matrices(clip, "optimizer=muon")
    assert hidden and all(name.startswith("text.blocks.") for name in hidden)


def test_flops_of_the_image_tower_are_those_of_the_projection() -> None:
    found = ForwardFlops.of(compose(*MODEL).model)
    assert found.image == 2 * 24 * 16
    assert found.text == ForwardFlops.of(compose(*MODEL, "model.image.features=48").model).text


def test_stages_with_other_settings_train_and_are_described_without_pixels() -> None:
    from clipx.config.duration import Length
    from clipx.trainer.stages import StagePlan

    spec = compose(*MODEL, "stages=[{until: 50%, batch_size: 32},{batch_size: 64}]")
    length = Length(256, 32, 256)
    plan = StagePlan.build(spec.stages, spec.model, spec.data, "1ep", length)
    assert plan.describe() == "4 steps of 32, up to sample 128; 2 steps of 64, up to sample 256"
    assert plan.row(0) == {"train/batch_size": 32}


def test_weights_of_another_input_are_rejected() -> None:
    ours, theirs = compose(*MODEL).model, compose(*MODEL, "model.image.features=32").model
    with pytest.raises(CheckpointError, match=r"model\.image\.features=32, expected 24: choose the model of these"):
        check_same(ours, theirs, "x")
    with pytest.raises(CheckpointError, match=r"model\.image\.features=none, expected 24"):
        check_same(ours, compose("model=tiny").model, "x")
    with pytest.raises(
        CheckpointError, match=r"^open_clip has no tower for model\.image\.features=24: use format=safe"
    ):
        config_of(ours)
