"""Attention within packed texts, causal or to all tokens of a text, on T tokens without padding.

On the CPU, texts of equal length are one batch of attention: packing sorts texts by length, so that these batches are
views. On CUDA it is torch's variable-length kernel: flash attention, which has requirements (see `is_supported`).

Shape suffixes: T tokens of all texts, S segments (texts), H heads, K width of a head, N texts of one length, L that
length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import register_flop_formula

from clipx.compat import FakeTensor, attention_cpu, attention_cpu_backward, attention_varlen

_Views = tuple[Tensor, Tensor, Tensor]


def is_supported(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Returns True if `varlen_attention` computes heads of this width on this device in this dtype.

    Flash attention needs 16 bits, NVIDIA's compute capability 8.0, and a width that is a multiple of 8, at most 256.
    """
    if device.type != "cuda":
        return device.type == "cpu"
    return dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= 256 and _is_ampere(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_attention(qkv_T3HK: Tensor, start_S: Tensor, longest: int, causal: bool = True) -> Tensor:
    """Attends from each token to itself and the earlier tokens of its segment, or without `causal` to all of them.
    [T, 3, H, K] -> [T, H, K].

    `start_S`: int32 [S + 1], the first token of each segment, then T. `longest`: upper bound of a segment's length.
    """
    if qkv_T3HK.device.type == "cpu":
        out_THK: Tensor = _cpu_attention(qkv_T3HK, start_S, causal)[0]
        return out_THK
    return cuda_attention(qkv_T3HK, start_S, longest, causal)


def cuda_attention(qkv_T3HK: Tensor, start_S: Tensor, longest: int, causal: bool = True) -> Tensor:
    q_THK, k_THK, v_THK = qkv_T3HK.unbind(1)
    window = (-1, 0) if causal else (-1, -1)
    # torch 2.15 prefers cuDNN, which builds a plan of 50 ms and more for each number of tokens, segments and `longest`.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        mixed = varlen_attn(q_THK, k_THK, v_THK, start_S, start_S, longest, longest, window_size=window)
    assert isinstance(mixed, Tensor)
    return mixed


# An operator, not a function, so that torch.compile does not specialize on the lengths of each batch.
@torch.library.custom_op("clipx::varlen_attention", mutates_args=())
def _cpu_attention(qkv_T3HK: Tensor, start_S: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns the outputs [T, H, K] and the logarithm of the sum of each softmax, H * T numbers in the order of the
    batches."""
    outs, lses = [], []
    for q_NHLK, k_NHLK, v_NHLK in _batches(qkv_T3HK, start_S):
        out_NHLK, lse_NHL = attention_cpu(q_NHLK, k_NHLK, v_NHLK, 0.0, causal)
        outs.append(out_NHLK.transpose(1, 2).flatten(0, 1))
        lses.append(lse_NHL.flatten())
    return torch.cat(outs), torch.cat(lses)


@torch.library.custom_op("clipx::varlen_attention_backward", mutates_args=())
def _cpu_backward(
    grad_THK: Tensor, qkv_T3HK: Tensor, out_THK: Tensor, lse: Tensor, start_S: Tensor, causal: bool
) -> Tensor:
    """Returns the gradient of the queries, keys and values, [T, 3, H, K]."""
    grad_qkv_T3HK = torch.empty_like(qkv_T3HK, memory_format=torch.contiguous_format)
    first = 0
    for q_NHLK, k_NHLK, v_NHLK in _batches(qkv_T3HK, start_S):
        texts, heads, length, _ = q_NHLK.shape
        rows = slice(first, first + texts * length)
        grad_NHLK, out_NHLK = (
            x_THK[rows].unflatten(0, (texts, length)).transpose(1, 2) for x_THK in (grad_THK, out_THK)
        )
        lse_NHL = lse[rows.start * heads : rows.stop * heads].view(texts, heads, length)
        parts = attention_cpu_backward(grad_NHLK, q_NHLK, k_NHLK, v_NHLK, out_NHLK, lse_NHL, 0.0, causal)
        for i, part_NHLK in enumerate(parts):
            grad_qkv_T3HK[rows, i].unflatten(0, (texts, length)).copy_(part_NHLK.transpose(1, 2))
        first = rows.stop
    return grad_qkv_T3HK


def _batches(qkv_T3HK: Tensor, start_S: Tensor) -> Iterator[_Views]:
    """Yields queries, keys and values [N, H, L, K] of each run of texts of the same length."""
    first = 0
    for length, texts in _runs(start_S):
        part_NL3HK = qkv_T3HK[first : first + texts * length].unflatten(0, (texts, length))
        q_NHLK, k_NHLK, v_NHLK = part_NL3HK.permute(2, 0, 3, 1, 4).unbind(0)
        yield q_NHLK, k_NHLK, v_NHLK
        first += texts * length


def _runs(start_S: Tensor) -> list[tuple[int, int]]:
    """Returns (length, number of consecutive segments of that length), without empty segments."""
    runs = itertools.groupby(start_S.diff().tolist())
    return [(length, len(list(run))) for length, run in runs if length]


@_cpu_attention.register_fake
def _(qkv_T3HK: Tensor, start_S: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    tokens, _, heads, width = qkv_T3HK.shape
    wide = torch.promote_types(qkv_T3HK.dtype, torch.float32)
    return qkv_T3HK.new_empty(tokens, heads, width), qkv_T3HK.new_empty(tokens * heads, dtype=wide)


@_cpu_backward.register_fake
def _(grad_THK: Tensor, qkv_T3HK: Tensor, out_THK: Tensor, lse: Tensor, start_S: Tensor, causal: bool) -> Tensor:
    return torch.empty_like(qkv_T3HK, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_THK: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    qkv_T3HK, start_S, out_THK, lse = ctx.saved_tensors
    return _cpu_backward(grad_THK.contiguous(), qkv_T3HK, out_THK, lse, start_S, ctx.causal), None, None


_cpu_attention.register_autograd(_backward, setup_context=_save)


def _product_flops(qkv_T3HK: Tensor, start_S: Tensor) -> int:
    """Returns the FLOPs of one of the products: scores of all pairs of a text's tokens, or their mean values. Texts of
    fake tensors have the same length."""
    tokens, _, heads, width = qkv_T3HK.shape
    fake = isinstance(start_S, FakeTensor)
    pairs = tokens**2 // (len(start_S) - 1) if fake else int(start_S.diff().long().square().sum())
    return 2 * heads * width * pairs


@register_flop_formula(torch.ops.clipx.varlen_attention, get_raw=True)
def _(qkv_T3HK: Tensor, start_S: Tensor, *_: Any, **__: Any) -> int:
    return 2 * _product_flops(qkv_T3HK, start_S)


@register_flop_formula(torch.ops.clipx.varlen_attention_backward, get_raw=True)
def _(grad_THK: Tensor, qkv_T3HK: Tensor, out_THK: Tensor, lse: Tensor, start_S: Tensor, *_: Any, **__: Any) -> int:
    return 5 * _product_flops(qkv_T3HK, start_S)  # one recomputes the scores


OPERATORS = (attention_varlen.default, torch.ops.clipx.varlen_attention.default)
"""Operators of the forward pass, for activation checkpointing."""
