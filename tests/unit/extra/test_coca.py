"""CoCa: features, scores and loss against open_clip; skipped computations."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.captioners import CPU, build, images, open_clip_twin, small_spec, tokens
from helpers.objective_cases import ONE
from helpers.runs import compose
from open_clip.loss import CoCaLoss  # type: ignore[import-untyped]
from torch import Tensor

from clipx.config.duration import Length
from clipx.extra.coca import decoder as decoding
from clipx.extra.coca.decoder import Captions
from clipx.extra.coca.model import CoCa, with_class_position
from clipx.extra.coca.spec import CoCaSpec
from clipx.model.tokenizer import Tokenizer
from clipx.objective.base import Objective, StepInputs
from clipx.weights.open_clip import ties, to_open_clip


def weights_of(twin: torch.nn.Module, model: CoCa, spec: CoCaSpec) -> dict[str, Tensor]:
    """Converts open_clip's weights to clipx and checks the inverse. Only the temperature has no counterpart."""
    theirs = {name: tensor for name, tensor in twin.state_dict().items() if name != "logit_scale"}
    ours = {tie.ours: tie.to_ours(theirs[tie.theirs]) for tie in ties(spec, model.state_dict())}
    again = to_open_clip(spec, ours)
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in theirs.items())
    return ours


def check_equal(spec: CoCaSpec, image_B3SS: Tensor, tokens_BL: Tensor, dtype: torch.dtype, atol: float) -> None:
    twin, model = open_clip_twin(spec, dtype), spec.build(CPU, dtype).eval()
    model.load_state_dict(weights_of(twin, model, spec))

    def same(found: Tensor, expected: Tensor, times: float = 1.0) -> None:
        torch.testing.assert_close(found, expected, rtol=0, atol=times * atol)

    with torch.no_grad():
        out = twin((image_B3SS.to(dtype) / 255 - model.image.mean_C11) / model.image.std_C11, tokens_BL)
        image_BD, text_BD, caption_B2 = model(image_B3SS, tokens_BL)
        same(image_BD, out["image_features"])
        same(text_BD, out["text_features"])
        same(model.encode_image(image_B3SS), image_BD)
        same(model.encode_text(tokens_BL), text_BD)
        used_BL = out["labels"] != Tokenizer.pad_id
        same(scores(model, image_B3SS, tokens_BL), out["logits"][used_BL], times=10)
        loss_BL = F.cross_entropy(out["logits"].transpose(1, 2), out["labels"], ignore_index=0, reduction="none")
        same(caption_B2, torch.stack([loss_BL.sum(1), used_BL.sum(1).to(dtype)], 1), times=100)
        scale, index = out["logit_scale"], torch.arange(len(image_BD))
        contrastive, caption = CoCaLoss(caption_loss_weight=2.0, clip_loss_weight=1.5)(
            out["image_features"], out["text_features"], out["logits"], out["labels"], scale
        )
        loss, metrics = objective(1.5, 2.0, math.log(scale))(StepInputs(image_BD, text_BD, index, (caption_B2,)))
        same(loss.to(dtype), contrastive + caption, times=10)
        same(1.5 * metrics["contrastive_loss"].to(dtype), contrastive, times=10)
        same(2.0 * metrics["caption_loss"].to(dtype), caption, times=10)


def scores(model: CoCa, image_B3SS: Tensor, tokens_BL: Tensor) -> Tensor:
    """Returns the scores of all target tokens, concatenated over the texts, [T, V]."""
    texts = with_class_position(tokens_BL, packed=True)
    captions = Captions.pack(tokens_BL, texts)
    x_TW, image_BNW = model.text(texts)[1][captions.source_T], model.image_tokens(image_B3SS)
    for block in model.decoder.blocks:
        x_TW = block(x_TW, image_BNW, captions.packing)
    return model.decoder.scores(x_TW)


def objective(contrastive_weight: float, caption_weight: float, log_scale: float = 0.0) -> Objective:
    weights = f"objective.contrastive_weight={contrastive_weight}", f"objective.caption_weight={caption_weight}"
    built = compose("model=coca_tiny", *weights).objective.build(ONE, Length(60, 6, 60)).double()
    built.temperature.log_scale.data.fill_(log_scale)
    return built


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_features_scores_and_loss_equal_those_of_open_clip(quick_gelu: bool) -> None:
    check_equal(small_spec(quick_gelu=quick_gelu), images(), tokens(), torch.float64, 1e-11)


def gradients(model: CoCa, image_B3SS: Tensor, tokens_BL: Tensor) -> dict[str, Tensor]:
    """Returns outputs and gradients of a loss that weighs each output differently."""
    model.zero_grad()
    image_BD, text_BD, caption_B2 = model.train()(image_B3SS, tokens_BL)
    weight_BD = torch.linspace(-1, 1, image_BD.numel(), dtype=image_BD.dtype).view_as(image_BD)
    loss = (weight_BD * image_BD - weight_BD.flip(1) * text_BD).sum() + (weight_BD[:, 0] * caption_B2[:, 0]).sum()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "captions": caption_B2.detach(), **found}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_skipping_the_padding_changes_neither_outputs_nor_gradients() -> None:
    packed, whole = build(), build(spec=small_spec(packed=False))
    assert_same(gradients(packed, images(), tokens()), gradients(whole, images(), tokens()))


def test_recomputation_and_scoring_tokens_in_chunks_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gradients(build(), images(), tokens())
    for policy in ("1", "selective", "tower"):
        assert_same(gradients(build(spec=small_spec(checkpointing=policy)), images(), tokens()), whole)
    monkeypatch.setattr(decoding, "SCORED_AT_ONCE", 7)
    assert_same(gradients(build(), images(), tokens()), whole)
