"""Triton kernels of the contrastive loss: the scores of a tile are computed and used without being stored.

A program multiplies a block of rows by a block of columns of `SplitProducts`' float16 operands and sums in float32, as
in any matrix product. Its epilogue is either the log-sum-exp of the block's rows and columns, or the weights of their
gradient, which a TF32 product multiplies by the features. One temperature for all pairs.

Notation: r rows and c columns of a tile, K = 3D, m row blocks, n column blocks. Import this module only where triton is
installed. The kernels run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clipx.objective.losses.products import SplitProducts

_BLOCK, _BLOCK_K = 128, 64  # two 16 KiB operands in shared memory for each of three stages: any device from 8.0
_LAUNCH = {"BLOCK": _BLOCK, "BLOCK_K": _BLOCK_K, "num_warps": 8, "num_stages": 3}


class FusedProducts(SplitProducts):
    """`SplitProducts` whose tiles are scored by the kernels of this module where all pairs have one temperature."""

    fused = True

    def lse(self, x_rK: Tensor, y_cK: Tensor, alpha: Tensor, diagonal: int) -> tuple[Tensor, Tensor]:
        rows, cols = len(x_rK), len(y_cK)
        blocks = (triton.cdiv(rows, _BLOCK), triton.cdiv(cols, _BLOCK))
        lse_nr, lse_mc = (x_rK.new_empty(size, dtype=torch.float32) for size in ((blocks[1], rows), (blocks[0], cols)))
        _lse[blocks](x_rK, y_cK, alpha, lse_nr, lse_mc, rows, cols, diagonal, x_rK.shape[1], **_LAUNCH)
        return lse_nr.logsumexp(0), lse_mc.logsumexp(0)

    def softmax(self, x_rK: Tensor, y_cK: Tensor, alpha: Tensor, a_r: Tensor, a_c: Tensor) -> Tensor:
        rows, cols = len(x_rK), len(y_cK)
        g_rc = x_rK.new_empty((rows, cols), dtype=torch.float32)
        blocks = (triton.cdiv(rows, _BLOCK), triton.cdiv(cols, _BLOCK))
        a_r, a_c = a_r.contiguous(), a_c.contiguous()
        _softmax[blocks](x_rK, y_cK, alpha, a_r, a_c, g_rc, rows, cols, x_rK.shape[1], **_LAUNCH)
        return g_rc


@triton.jit  # type: ignore[untyped-decorator]
def _lse(  # type: ignore[no-untyped-def]
    x, y, alpha, lse_nr, lse_mc, rows, cols, diagonal, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Stores log Σ exp z over each row and each column of a block. Pairs with row + diagonal = column are left out."""
    m, n = tl.program_id(0), tl.program_id(1)
    row, col, z = _logits(x, y, alpha, m, n, rows, cols, K, BLOCK, BLOCK_K)
    inside = (row[:, None] < rows) & (col[None, :] < cols) & (row[:, None] + diagonal != col[None, :])
    z = tl.where(inside, z, float("-inf"))
    tl.store(lse_nr + n * rows + row, _logsumexp(z, 1), mask=row < rows)
    tl.store(lse_mc + m * cols + col, _logsumexp(z, 0), mask=col < cols)


@triton.jit  # type: ignore[untyped-decorator]
def _softmax(  # type: ignore[no-untyped-def]
    x, y, alpha, a_r, a_c, g_rc, rows, cols, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Stores exp(z_ij - ar_i) + exp(z_ij - ac_j) of a block."""
    row, col, z = _logits(x, y, alpha, tl.program_id(0), tl.program_id(1), rows, cols, K, BLOCK, BLOCK_K)
    inside = (row[:, None] < rows) & (col[None, :] < cols)
    shift_r = tl.load(a_r + row, mask=row < rows, other=float("inf"))
    shift_c = tl.load(a_c + col, mask=col < cols, other=float("inf"))
    g = tl.exp(z - shift_r[:, None]) + tl.exp(z - shift_c[None, :])
    tl.store(g_rc + row[:, None].to(tl.int64) * cols + col[None, :], g, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _logits(  # type: ignore[no-untyped-def]
    x, y, alpha, m, n, rows, cols, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Returns the numbers of the rows and columns of a block, and its z."""
    row, col = m * BLOCK + tl.arange(0, BLOCK), n * BLOCK + tl.arange(0, BLOCK)
    s = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = tl.load(x + row[:, None] * K + k[None, :], mask=(row[:, None] < rows) & (k[None, :] < K), other=0.0)
        right = tl.load(y + col[None, :] * K + k[:, None], mask=(col[None, :] < cols) & (k[:, None] < K), other=0.0)
        s = tl.dot(left, right, s)
    return row, col, s * tl.load(alpha)


@triton.jit  # type: ignore[untyped-decorator]
def _logsumexp(z, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    top = tl.max(z, axis)
    top = tl.where(top == float("-inf"), 0.0, top)  # a block without pairs gives -inf, not NaN
    return top + tl.log(tl.sum(tl.exp(z - tl.expand_dims(top, axis)), axis))
