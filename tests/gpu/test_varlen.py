"""Variable-length attention of packed texts on CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import needs_cuda
from helpers.hf_models import save_config
from helpers.packed_towers import assert_packed_equals_masked
from helpers.texts import captions
from torch import Tensor, nn

from clipx.extra.hf_text.spec import HfTextSpec
from clipx.extra.hf_text.tower import HfTextTower
from clipx.model.packing import CUDA_MULTIPLE, Packing
from clipx.model.text import TextTower
from clipx.model.text_spec import CLIP_END_ID, CLIP_VOCABULARY, ClipTextSpec, Mlp, Norm, Pool, Positions

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def gradients(packed: bool, compiled: bool, tokens_BL: Tensor, autocast: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    spec = ClipTextSpec(context_length=77, width=256, heads=4, layers=3, packed=packed)
    tower = TextTower(spec, 64, quick_gelu=False).to(CUDA)
    for block in tower.blocks if compiled else []:
        block.compile(dynamic=True)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        features_BD = tower(tokens_BL)
    features_BD.float().square().sum().backward()
    found = {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}
    return {"features": features_BD.detach().float(), **found}


@needs_cuda
@pytest.mark.parametrize("texts", [5, 300])
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_texts_have_the_features_and_gradients_of_padded_texts(texts: int, compiled: bool) -> None:
    """The reference is float32; the error of both forms in bfloat16 is of the same size."""
    tokens_BL = captions(texts, 77, 0)
    exact = gradients(False, False, tokens_BL, autocast=False)
    padded = gradients(False, False, tokens_BL, autocast=True)
    for name, found in gradients(True, compiled, tokens_BL, autocast=True).items():
        error, usual = ((x - exact[name]).norm() / exact[name].norm() for x in (found, padded[name]))
        assert error < 1.5 * usual + 1e-3, name


def other_tower(kind: str, folder: Path) -> nn.Module:
    """Builds a tower whose tokens attend both ways, or with fewer keys than queries. Texts end by CLIP's end token."""
    torch.manual_seed(0)
    if kind == "clip":
        form = {"positions": Positions.rotary, "norm": Norm.rms, "mlp": Mlp.swiglu, "bias": False}
        spec = ClipTextSpec(width=256, heads=4, layers=3, causal=False, pool=Pool.mean, **form)
        return TextTower(spec, 64, quick_gelu=False)
    source = save_config(folder, kind)
    options = {"vocab_size": CLIP_VOCABULARY, "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 3}
    options = {key: value for key, value in options.items() if key != "head_dim" or kind == "qwen3"}
    return HfTextTower(HfTextSpec(source=source, options=options, pool=Pool.mean, end_id=CLIP_END_ID), 64).eval()


@pytest.mark.parametrize("kind", ["clip", "xlm-roberta", "modernbert", "qwen3"])
def test_packed_texts_of_other_towers_have_the_features_and_gradients_of_a_mask(
    kind: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_BL = captions(300, 77, 0)
    tower = other_tower(kind, tmp_path).to(device)
    modules = ("clipx.model.packing", "clipx.extra.hf_text.tower")
    assert_packed_equals_masked(tower, tokens_BL, device, monkeypatch, modules)


@needs_cuda
def test_attention_without_padding_is_called_for_rounded_packings() -> None:
    packing = Packing.pack(captions(300, 77, 0), packed=True, multiple=CUDA_MULTIPLE)
    assert packing.start_S is not None
    assert len(packing.tokens_T) == int(packing.start_S[-1]) > len(packing.flat_index_T)
    pinned = packing.pin_memory()
    assert pinned.tokens_T.is_pinned()
    assert torch.equal(pinned.to(CUDA).tokens_T.cpu(), packing.tokens_T)
