"""Attention within packed texts, and packings whose number of tokens is rounded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.texts import captions
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clipx.model import varlen
from clipx.model.packing import Packing
from clipx.model.text import TextTower
from clipx.model.text_spec import ClipTextSpec
from clipx.model.tokenizer import Tokenizer

LENGTH, HEADS = 24, 2


def build(packed: bool, dtype: torch.dtype = torch.float64) -> TextTower:
    torch.manual_seed(0)
    spec = ClipTextSpec(context_length=LENGTH, width=32, heads=HEADS, layers=3, packed=packed)
    return TextTower(spec, 16, quick_gelu=False).to(dtype)


def results(tower: TextTower, texts: Tensor | Packing) -> dict[str, Tensor]:
    """Returns the features of texts, and the gradients of a loss that depends on their order."""
    features_BD = tower(texts)
    random = torch.Generator().manual_seed(1)
    weight_BD = torch.randn(features_BD.shape, generator=random, dtype=torch.float64)
    (features_BD * weight_BD).sum().backward()
    gradients = {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}
    return {"features": features_BD.detach(), **gradients}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.any()
        assert (found[name] - value).abs().max() <= tolerance * value.abs().max(), name


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Tensor:
    """torch's varlen_attn with window_size=(-1, 0), by its definition; rows of segments above max_q are not computed."""
    assert options == {"window_size": (-1, 0)}
    assert cu_seq_q is cu_seq_k
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k
    starts = cu_seq_q.tolist()
    assert (starts[0], starts[-1]) == (0, len(query))
    outs = []
    for first, stop in itertools.pairwise(starts):
        q_HLK, k_HLK, v_HLK = (x[first:stop].transpose(0, 1) for x in (query, key, value))
        above_LL = torch.ones(stop - first, stop - first, dtype=torch.bool).triu(1)
        scores_HLL = (q_HLK @ k_HLK.mT / q_HLK.shape[-1] ** 0.5).masked_fill(above_LL, -torch.inf)
        out_LHK = (scores_HLL.softmax(-1) @ v_HLK).transpose(0, 1)
        outs.append(out_LHK if stop - first <= max_q else torch.full_like(out_LHK, torch.nan))
    return torch.cat(outs)


@pytest.mark.parametrize("multiple", [1, 16, 1024])
def test_the_kernel_of_cuda_is_called_with_the_segments_of_the_texts(
    multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", reference)  # the kernel, by its definition
    monkeypatch.setattr("clipx.model.packing.varlen_attention", varlen.cuda_attention)
    tokens_BL = captions(120, LENGTH, 0)
    packing = Packing.pack(tokens_BL, packed=True, multiple=multiple)
    assert_equal(results(build(True), packing), results(build(False), tokens_BL))


def test_rounded_packings_are_exact_where_attention_pads_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipx.model.packing.is_supported", lambda *_: False)
    tokens_BL = captions(120, LENGTH, 0)
    packing = Packing.pack(tokens_BL, packed=True, multiple=1024)
    assert len(packing.tokens_T) > len(packing.flat_index_T)
    assert_equal(results(build(True), packing), results(build(False), tokens_BL))


def test_attention_on_cuda_has_the_requirements_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, bf16 = torch.device("cuda", 0), torch.bfloat16
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    assert varlen.is_supported(cuda, bf16, 64) and varlen.is_supported(cuda, torch.float16, 256)
    for dtype, width in ((bf16, 4), (bf16, 264), (torch.float32, 64)):
        assert not varlen.is_supported(cuda, dtype, width) and varlen.is_supported(torch.device("cpu"), dtype, width)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert not varlen.is_supported(cuda, torch.float16, 64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_on_the_cpu_equals_its_definition(dtype: torch.dtype) -> None:
    lengths = torch.tensor([1, 3, 3, 3, 7, 2, 2, 0, 9, 0])  # in any order, and empty segments
    start_S = F.pad(lengths.cumsum(0), (1, 0)).int()
    torch.manual_seed(0)
    qkv_T3HK, weight_THK = torch.randn(30, 3, 2, 8).to(dtype), torch.randn(30, 2, 8).to(dtype)
    found, expected = [], []
    for x, into in ((qkv_T3HK.clone(), found), (qkv_T3HK.double(), expected)):
        x.requires_grad_()
        q, k, v = x.unbind(1)
        if into is found:
            out_THK = varlen.varlen_attention(x, start_S, 9)
        else:
            out_THK = reference(q, k, v, start_S, start_S, 9, 9, window_size=(-1, 0))
        (out_THK * weight_THK).sum().backward()
        assert x.grad is not None
        into += [out_THK.detach().double(), x.grad.double()]
    tolerance = 20 * torch.finfo(dtype).eps
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
def test_the_operator_satisfies_the_rules_of_torch_compile(causal: bool) -> None:
    qkv_T3HK, start_S = torch.randn(9, 3, 2, 8, requires_grad=True), torch.tensor([0, 2, 4, 9], dtype=torch.int32)
    torch.library.opcheck(torch.ops.clipx.varlen_attention, (qkv_T3HK, start_S, causal))


def test_a_second_derivative_is_an_error() -> None:
    qkv_T3HK = torch.randn(7, 3, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out_THK = varlen.varlen_attention(qkv_T3HK, torch.tensor([0, 3, 7], dtype=torch.int32), 4)
    (first,) = torch.autograd.grad(out_THK.square().sum(), qkv_T3HK, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        torch.autograd.grad(first.square().sum(), qkv_T3HK)


@given(st.lists(st.integers(2, 77), min_size=1, max_size=200), st.sampled_from([1, 16, 256, 1024]))
def test_a_packing_holds_each_text_up_to_its_end_and_rounding_adds_at_most_a_16th(
    lengths: list[int], multiple: int
) -> None:
    at_L, length_B1 = torch.arange(77), torch.tensor(lengths)[:, None]
    tokens_BL = torch.where(at_L < length_B1, 1 + at_L + 77 * torch.arange(len(lengths))[:, None], 0)
    tokens_BL.scatter_(1, length_B1 - 1, Tokenizer.end_id)
    exact, rounded = (Packing.pack(tokens_BL, True, multiple=number) for number in (1, multiple))
    tokens, size = len(exact.tokens_T), len(rounded.tokens_T)
    assert tokens == sum(lengths) <= size <= tokens * (1 + 1 / 16)
    assert torch.equal(rounded.spread(rounded.tokens_T[:, None])[..., 0], tokens_BL[:, : max(lengths)])
    assert rounded.first_B is not None and rounded.start_S is not None and exact.start_S is not None
    assert (rounded.end_B - rounded.first_B + 1).tolist() == lengths
    assert (rounded.tokens_T[rounded.end_B] == Tokenizer.end_id).all()
    assert set(rounded.tokens_T[tokens:].tolist()) <= {int(rounded.tokens_T[0])}
    assert not rounded.position_T[tokens:].any()
    lengths_S = rounded.start_S.diff()
    assert lengths_S[: len(lengths)].tolist() == sorted(lengths)
    assert 0 <= lengths_S.min() <= lengths_S.max() <= rounded.longest
    assert (int(rounded.start_S[0]), int(rounded.start_S[-1])) == (0, size)
    assert len(lengths_S) in (len(lengths), len(lengths) + multiple // 16), "one number of segments for most batches"
