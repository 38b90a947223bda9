"""Options of clipx's own text tower beyond CLIP's form: rotary positions, RMSNorm, SwiGLU, pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from clipx.model import packing as packing_module
from clipx.model.text import TextPool, TextTower
from clipx.model.text_spec import ClipTextSpec, Mlp, Norm, Pool, Positions, TextProjection

LENGTH, WIDTH, HEADS = 12, 32, 2
SMALL: dict[str, Any] = {
    "context_length": LENGTH,
    "width": WIDTH,
    "heads": HEADS,
    "layers": 2,
    "vocabulary": 99,
    "tokenizer": "tokenizer.json",
    "end_id": 2,
}
MODERN: dict[str, Any] = {
    "positions": Positions.rotary,
    "norm": Norm.rms,
    "mlp": Mlp.swiglu,
    "bias": False,
    "mlp_ratio": 2.5,
}


def build(**options: Any) -> TextTower:
    torch.manual_seed(0)
    spec = ClipTextSpec(**{**SMALL, **options})
    return TextTower(spec, WIDTH, quick_gelu=False).double()


def texts(*lengths: int) -> Tensor:
    """Returns rows of random tokens, each with the end token 2 at its last position, and padding 1."""
    tokens_BL = torch.randint(5, 99, (len(lengths), LENGTH), generator=torch.Generator().manual_seed(1))
    for row, used in enumerate(lengths):
        tokens_BL[row, used - 1], tokens_BL[row, used:] = 2, 1
    return tokens_BL


def test_the_modern_form_equals_llama() -> None:
    tower = build(**MODERN, projection=TextProjection.none, norm_eps=1e-6, rotary_base=5000.0)
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=2, intermediate_size=80,
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, pad_token_id=1,
    )  # fmt: skip
    llama = transformers.AutoModel.from_config(config).double().eval()
    ours, theirs = tower.state_dict(), llama.state_dict()
    named = {"embed_tokens.weight": ours["token_embedding.weight"], "norm.weight": ours["norm.weight"]}
    for i in range(2):
        here, there = f"blocks.{i}", f"layers.{i}"
        for name, part in zip("qkv", ours[f"{here}.attn.qkv.weight"].chunk(3), strict=True):
            named[f"{there}.self_attn.{name}_proj.weight"] = part
        for name, part in zip(("gate", "up"), ours[f"{here}.mlp.fc1.weight"].chunk(2), strict=True):
            named[f"{there}.mlp.{name}_proj.weight"] = part
        named[f"{there}.self_attn.o_proj.weight"] = ours[f"{here}.attn.proj.weight"]
        named[f"{there}.mlp.down_proj.weight"] = ours[f"{here}.mlp.fc2.weight"]
        named[f"{there}.input_layernorm.weight"] = ours[f"{here}.norm1.weight"]
        named[f"{there}.post_attention_layernorm.weight"] = ours[f"{here}.norm2.weight"]
    assert named.keys() == theirs.keys()
    llama.load_state_dict(named)
    tokens_BL = texts(3, 12, 7)
    with torch.no_grad():
        tokens_BLW = llama(tokens_BL).last_hidden_state
        found_BW = tower(tokens_BL)
    assert found_BW.std() > 0.1
    torch.testing.assert_close(found_BW, tokens_BLW[torch.arange(3), torch.tensor([2, 11, 6])], atol=1e-6, rtol=0)


@pytest.mark.parametrize("supported", [True, False], ids=["varlen", "masked"])
@pytest.mark.parametrize("pool", [Pool.end, Pool.cls, Pool.mean, Pool.max, Pool.map])
@pytest.mark.parametrize("form", [{}, MODERN], ids=["clip", "modern"])
def test_packed_texts_have_the_features_of_each_text_alone(
    form: dict[str, Any], pool: Pool, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_module, "is_supported", lambda *_: supported)
    tower = build(**form, pool=pool, causal=False)
    tokens_BL = texts(5, 12, 2, 5)
    alone = [tower(tokens_BL[i : i + 1]) for i in range(4)]
    together_BD = tower(tokens_BL)
    assert together_BD.std() > 0.01
    torch.testing.assert_close(together_BD, torch.cat(alone), atol=1e-12, rtol=0)


def test_pools_read_the_tokens_of_the_text() -> None:
    tokens_BL = texts(5, 12, 2)
    tower = build(causal=False, projection=TextProjection.none)
    packing = packing_module.Packing.pack(tokens_BL, True, tower.end)
    x_TW = torch.randn(len(packing.tokens_T), WIDTH, dtype=torch.float64)
    of_text = [x_TW[(packing.start_S[i]) : packing.start_S[i + 1]] for i in (1, 2, 0)]  # sorted by length
    expected = {Pool.cls: [x[0] for x in of_text], Pool.end: [x[-1] for x in of_text]}
    expected |= {Pool.mean: [x.mean(0) for x in of_text], Pool.max: [x.amax(0) for x in of_text]}
    for pool, rows in expected.items():
        torch.testing.assert_close(TextPool(pool, WIDTH, HEADS)(x_TW, packing), torch.stack(rows))
