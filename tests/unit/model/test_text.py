"""The text tower: CLIP's initialization, causality, the position of the embedding, packed texts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clipx.model.text import QuickGELU, TextTower
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
START, END = Tokenizer.start_id, Tokenizer.end_id


def build(packed: bool) -> TextTower:
    torch.manual_seed(0)
    spec = ClipTextSpec(context_length=LENGTH, width=WIDTH, heads=3, layers=DEPTH, packed=packed)
    return TextTower(spec, 64, quick_gelu=False)


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "padded"])
def tower(request: pytest.FixtureRequest) -> TextTower:
    return build(request.param)


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


def test_attention_starts_without_bias_and_norms_as_the_identity(tower: TextTower) -> None:
    assert not any(p.any() for name, p in tower.named_parameters() if ".attn." in name and name.endswith("bias"))
    for norm in (m for m in tower.modules() if isinstance(m, nn.LayerNorm)):
        assert torch.equal(norm.weight, torch.ones(WIDTH)) and not norm.bias.any()


def text(*ids: int) -> Tensor:
    return torch.tensor([[START, *ids, *[Tokenizer.pad_id] * (LENGTH - 1 - len(ids))]])


@torch.no_grad()
def test_tokens_after_the_end_token_have_no_effect(tower: TextTower) -> None:
    features_1D = tower(text(320, 1125, END))
    for other in (text(320, 1125, END, 7, 8, 9), text(320, 1125, END, END), text(320, 1125, END, 539, END, 2368)):
        torch.testing.assert_close(tower(other), features_1D, rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("other", [(321, 1125, END), (320, 1126, END), (1125, 320, END), (320, 1125, 539, END)])
def test_tokens_before_the_end_token_have_an_effect(tower: TextTower, other: tuple[int, ...]) -> None:
    assert (tower(text(*other)) - tower(text(320, 1125, END))).abs().max() > 1e-3


def test_a_row_does_not_depend_on_its_batch_and_no_gradient_reaches_tokens_after_the_end(tower: TextTower) -> None:
    texts_BL = Tokenizer(LENGTH)(TEXTS)
    rows = torch.cat([tower(row_1L) for row_1L in texts_BL.split(1)])
    torch.testing.assert_close(tower(texts_BL), rows, rtol=0, atol=1e-5)
    loss = tower(text(320, END, 11, 12)).square().sum()
    grad_VW = torch.autograd.grad(loss, tower.token_embedding.weight)[0]
    assert set(grad_VW.any(dim=1).nonzero().flatten().tolist()) == {START, 320, END}


@torch.no_grad()
def test_residual_stream_stays_in_float32_under_autocast(tower: TextTower) -> None:
    seen: list[torch.dtype] = []
    hooks = [block.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype)) for block in tower.blocks]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features_1D = tower(text(320, END))
    for hook in hooks:
        hook.remove()
    assert seen == [torch.float32] * DEPTH
    assert features_1D.dtype == torch.bfloat16  # the projection is a matrix product


def test_quick_gelu_matches_its_definition() -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(QuickGELU()(x), x / (1 + torch.exp(-1.702 * x)))
    quick = TextTower(ClipTextSpec(context_length=8, width=16, heads=2, layers=2, mlp_ratio=2.5), 8, quick_gelu=True)
    assert [tuple(block.get_parameter("mlp.fc1.weight").shape) for block in quick.blocks] == [(40, 16)] * 2
    assert [type(m) for m in quick.modules() if isinstance(m, QuickGELU | nn.GELU)] == [QuickGELU] * 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_packed_and_padded_texts_have_equal_features_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    tokens_BL = Tokenizer(LENGTH)(TEXTS)
    found = []
    for tower in (build(True).to(dtype), build(False).to(dtype)):
        features_BD = tower(tokens_BL)
        features_BD.square().mean().backward()
        found.append({"features": features_BD.detach(), **{n: p.grad for n, p in tower.named_parameters()}})
    for name, padded in found[1].items():
        assert padded is not None
        assert padded.any()
        assert (found[0][name] - padded).abs().max() <= tolerance * padded.abs().max(), name


@torch.no_grad()
def test_packing_skips_the_padding_tokens() -> None:
    tokens_BL = Tokenizer(LENGTH)(TEXTS)
    rows: list[int] = []
    for packed in (True, False):
        tower = build(packed)
        tower.blocks[0].mlp.register_forward_hook(lambda _module, _args, out: rows.append(len(out)))
        tower(tokens_BL)
    assert rows == [int((tokens_BL != Tokenizer.pad_id).sum()), tokens_BL.numel()]
