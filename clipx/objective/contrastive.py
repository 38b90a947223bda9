"""The contrastive kernel: exact loss and gradients over all pairs of the global batch, tile by tile.

Notation: b local batch, B global batch, D embedding, t tile. α the inverse temperature, z_ij = α x_i·y_j,
pos_i = z_ii, ℓ_i = log Σ_{j≠i} exp z_ij. A normaliser turns (ℓ, pos) into a log-normaliser a; the loss is the mean
over B of ½[(ar_i - pos_i) + (ac_i - pos_i)], r for the image's row, c for the text's. Its gradient needs a alone:

    dz_ij = 1/(2B) · [exp(z_ij - ar_i) + exp(z_ij - ac_j)]        j ≠ i
    dz_ii = -1/(2B) · [exp(ℓr_i - ar_i) + exp(ℓc_i - ac_i)]

Each rank scores its own images against all texts and its own texts against all images. Two all_gathers move the
features and then three numbers a sample; nothing is reduced, and no [b, B] or gathered gradient is ever stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from clipx.distributed import Comm
from clipx.objective.base import Metrics, Objective
from clipx.objective.temperature import GlobalTemperature

Normaliser = Callable[[Tensor, Tensor], Tensor]
"""(ℓ_b, pos_b) -> a_b"""


def in_batch(lse_b: Tensor, pos_b: Tensor) -> Tensor:
    """The softmax's own normaliser, over all pairs of the row (InfoNCE)."""
    return torch.logaddexp(lse_b, pos_b)


class Contrastive(Objective):
    """A symmetric contrastive loss with a learned global temperature and a normaliser."""

    def __init__(self, comm: Comm, temperature: GlobalTemperature, normaliser: Normaliser, tile: int) -> None:
        super().__init__()
        self.comm, self.normaliser, self.tile = comm, normaliser, tile
        self.temperature = temperature

    def forward(self, image_bD: Tensor, text_bD: Tensor, index_b: Tensor) -> tuple[Tensor, Metrics]:
        scale = self.temperature()
        loss = contrastive_loss(image_bD, text_bD, scale, self.normaliser, self.comm, self.tile)
        return loss, {"temperature": 1 / scale.detach(), "logit_scale": scale.detach()}

    def after_step(self, samples_seen: int) -> None:
        self.temperature.clamp()


def contrastive_loss(
    image_bD: Tensor, text_bD: Tensor, scale: Tensor, normaliser: Normaliser, comm: Comm, tile: int
) -> Tensor:
    """The global loss, 0-dim. Gradients: see `Objective`. Float32 or wider, whatever the inputs or autocast."""
    loss: Tensor = _ContrastiveLoss.apply(image_bD, text_bD, scale, normaliser, comm, tile)
    return loss


class _ContrastiveLoss(torch.autograd.Function):
    """Computes the gradients in forward: the loss is a scalar, so backward only scales them, and what was gathered is
    freed before the towers' backward needs the memory."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, scale: Tensor, normaliser: Normaliser, comm: Comm, tile: int
    ) -> Tensor:
        dtype = torch.promote_types(image.dtype, torch.float32)
        with full_precision(image.device.type):
            x_bD, y_bD, alpha = image.to(dtype), text.to(dtype), scale.to(dtype)
            x_BD, y_BD = comm.gather(x_bD), comm.gather(y_bD)
            first = comm.rank * len(x_bD)
            pos_b = alpha * (x_bD * y_bD).sum(1)
            lse_r, lse_c = (row_lse(q, k, alpha, first, tile) for q, k in ((x_bD, y_BD), (y_bD, x_BD)))
            a_r, a_c = normaliser(lse_r, pos_b), normaliser(lse_c, pos_b)
            a_rG, a_cG, pos_B = comm.gather(torch.stack([a_r, a_c, pos_b], 1)).unbind(1)
            if any(ctx.needs_input_grad[:3]):
                diagonal_b = -((lse_r - a_r).exp() + (lse_c - a_c).exp())
                w = alpha / (2 * len(x_BD))
                dx = w * row_gradient(x_bD, y_BD, alpha, a_r, a_cG, diagonal_b, first, tile)
                dy = w * row_gradient(y_bD, x_BD, alpha, a_c, a_rG, diagonal_b, first, tile)
                ctx.save_for_backward(
                    dx.to(image.dtype), dy.to(text.dtype), ((x_bD * dx).sum() / alpha).to(scale.dtype)
                )
            return (0.5 * (a_rG + a_cG) - pos_B).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return (*(grad * saved for saved in ctx.saved_tensors), None, None, None)


def row_lse(q_bD: Tensor, k_BD: Tensor, scale: Tensor, first: int, tile: int) -> Tensor:
    """ℓ_b = log Σ_j exp(scale · q_i·k_j) over the keys but i's own, which is number first + i."""
    lse_b = q_bD.new_full((len(q_bD),), -torch.inf)
    for start, k_tD in _tiles(k_BD, tile):
        z_bt = scale * (q_bD @ k_tD.T)
        z_bt.diagonal(first - start).fill_(-torch.inf)  # masked before the maximum is taken
        lse_b = torch.logaddexp(lse_b, z_bt.logsumexp(1))
    return lse_b


def row_gradient(
    q_bD: Tensor, k_BD: Tensor, scale: Tensor, a_b: Tensor, a_B: Tensor, diagonal_b: Tensor, first: int, tile: int
) -> Tensor:
    """Σ_j g_ij k_j with g_ij = exp(z_ij - a_b) + exp(z_ij - a_B), and diagonal_b for i's own key."""
    out_bD = torch.zeros_like(q_bD)
    for start, k_tD in _tiles(k_BD, tile):
        z_bt = scale * (q_bD @ k_tD.T)
        g_bt = (z_bt - a_b[:, None]).exp_().add_(z_bt.sub_(a_B[start : start + tile]).exp_())
        own = g_bt.diagonal(first - start)
        begin = max(0, start - first)
        own.copy_(diagonal_b[begin : begin + len(own)])
        out_bD.addmm_(g_bt, k_tD)
    return out_bD


def _tiles(k_BD: Tensor, tile: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, len(k_BD), tile):
        yield start, k_BD[start : start + tile]


@contextlib.contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """No autocast and no TF32: with logits near 100, bfloat16 rounds to multiples of 0.5 and TF32 to 0.06."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
