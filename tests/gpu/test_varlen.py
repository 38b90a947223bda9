"""Variable-length attention of packed texts on CUDA."""

from __future__ import annotations

import pytest
import torch
from helpers import needs_cuda
from torch import Tensor

from clipx.bench.training import captions
from clipx.model.text import CUDA_MULTIPLE, Packing, TextTower
from clipx.model.text_spec import ClipTextSpec

pytestmark = [pytest.mark.gpu, needs_cuda]
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


def test_attention_without_padding_is_called_for_rounded_packings() -> None:
    packing = Packing.of(captions(300, 77, 0), packed=True, multiple=CUDA_MULTIPLE)
    assert packing.start_S is not None
    assert len(packing.tokens_T) == int(packing.start_S[-1]) > len(packing.flat_index_T)
    pinned = packing.pin_memory()
    assert pinned.tokens_T.is_pinned()
    assert torch.equal(pinned.to(CUDA).tokens_T.cpu(), packing.tokens_T)
