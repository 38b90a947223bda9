"""Matrix products of the contrastive kernel: in the format of the features, or on tensor cores with a bounded error.

Split products compute s = x·y as lo·hi + hi·lo + hi·hi, with x = hi + lo + ε and hi, lo in float16: one float16 product
of width 3D that accumulates in float32. float16 has 11 significant bits and float16 embeddings of unit norm cannot
overflow, so that |ε_k| ≤ 2^-22 |x_k| + 2^-25 and, with lo·lo left out,

    |error of s| ≤ 3·2^-22 + √D·2^-24      2.1e-6 at D = 512: 2.1e-4 for logits at α = 100

in addition to float32's own rounding of a sum. Tensor cores truncate each addition instead of rounding it, in units of
the sum so far: the small products come first, while it is small. bfloat16 has 8 significant bits: the same three
products bound the error of logits by 3e-3 only. The gradients' products g·y are TF32, which rounds g and y to 11
significant bits and has the range of float32: each off-diagonal term of a gradient has a relative error of at most
2^-10, 3e-4 on average.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class Products:
    """Products in the format of the features: float32 without TF32, or float64.

    `left` and `right` return what `scores` multiplies; they are called once a step for all gathered features.
    """

    fused = False
    """Whether `lse` and `softmax` are implemented, which compute functions of a tile without storing its scores."""

    def left(self, x_BD: Tensor) -> Tensor:
        return x_BD

    def right(self, y_BD: Tensor) -> Tensor:
        return y_BD

    def scores(self, x_rK: Tensor, y_cK: Tensor) -> Tensor:
        """Returns s of rows of `left` and rows of `right`."""
        return x_rK @ y_cK.T

    def add(self, out_rD: Tensor, g_rc: Tensor, y_cD: Tensor) -> None:
        """Adds g·y to `out_rD`."""
        out_rD.addmm_(g_rc, y_cD)

    def lse(self, x_rK: Tensor, y_cK: Tensor, alpha: Tensor, diagonal: int) -> tuple[Tensor, Tensor]:
        """Returns log Σ exp(α s) over each row and each column of a tile, without its pairs i + diagonal = j."""
        raise NotImplementedError

    def softmax(self, x_rK: Tensor, y_cK: Tensor, alpha: Tensor, a_r: Tensor, a_c: Tensor) -> Tensor:
        """Returns exp(α s_ij - ar_i) + exp(α s_ij - ac_j) of a tile."""
        raise NotImplementedError


class SplitProducts(Products):
    """Scores from float16 halves, gradients in TF32, for float32 features. Emulated on devices other than CUDA."""

    def left(self, x_BD: Tensor) -> Tensor:
        high, low = halves(x_BD)
        return torch.cat([low, high, high], 1)

    def right(self, y_BD: Tensor) -> Tensor:
        high, low = halves(y_BD)
        return torch.cat([high, low, high], 1)

    def scores(self, x_rK: Tensor, y_cK: Tensor) -> Tensor:
        if x_rK.is_cuda:
            return torch.mm(x_rK, y_cK.T, out_dtype=torch.float32)
        return x_rK.float() @ y_cK.float().T  # float32 represents products of float16 exactly

    def add(self, out_rD: Tensor, g_rc: Tensor, y_cD: Tensor) -> None:
        if not g_rc.is_cuda:
            out_rD.addmm_(round_to_tf32(g_rc), round_to_tf32(y_cD))
            return
        with tf32(True):
            out_rD.addmm_(g_rc, y_cD)


EXACT = Products()


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float16 hi and lo with x ≈ hi + lo."""
    high = x.half()
    return high, (x - high).half()


def round_to_tf32(x: Tensor) -> Tensor:
    """Returns float32 `x` rounded to the 11 significant bits of TF32, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@contextlib.contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Disables autocast and TF32: for logits near 100, bfloat16 rounds to multiples of 0.5 and TF32 to 0.06."""
    with tf32(False), torch.autocast(device_type, enabled=False):
        yield


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allows or forbids TF32 in float32 products on CUDA."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
