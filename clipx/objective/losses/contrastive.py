"""The contrastive kernel: exact loss and gradients over all pairs of the global batch, computed tile by tile.

Notation: b local batch, B global batch, D embedding, t tile; image i, text j, s_ij = x_i·y_j, inverse temperature α,
z_ij = α s_ij, pos_i = z_ii, ℓr_i = log Σ_{j≠i} exp z_ij (image i against the texts), ℓc_j = log Σ_{i≠j} exp z_ij.
A normaliser maps (ℓ, pos) to a log-normaliser a, from which the gradient of the loss follows:

    2B · dz_ij = exp(z_ij - ar_i) + exp(z_ij - ac_j)               i ≠ j
    2B · dz_ii = -exp(ℓr_i - ar_i) - exp(ℓc_i - ac_i)

A rank scores the tiles of the [B, B] matrix in the rows of its images or the columns of its texts. One all_gather
exchanges the features, a second one a few numbers per sample. Nothing is reduced, and neither the matrix nor a gathered
gradient is ever stored: a rank holds the gathered features, a few t x t tiles, and the gradients of its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.errors import require
from clipx.objective.base import Compiler, Metrics, Objective, StepInputs
from clipx.objective.losses.products import EXACT, Products, full_precision
from clipx.objective.losses.temperature import Temperature

Normaliser = Callable[[Tensor, Tensor, "Pairs"], tuple[Tensor, Tensor]]
"""(ℓ_b2, pos_b2, pairs) -> (a_b2, loss_b2); column 0 is the image's row, 1 the text's. The loss is of each sample."""

Scored = tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]
"""A loss, 0-dim; its gradients with respect to images, texts and parameters; further outputs without gradient."""


def in_batch(lse_b2: Tensor, pos_b2: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Normaliser of the softmax over all pairs of the row (InfoNCE)."""
    a_b2 = torch.logaddexp(lse_b2, pos_b2)
    return a_b2, a_b2 - pos_b2


def negatives_only(lse_b2: Tensor, pos_b2: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Normaliser without the positive pair (decoupled contrastive learning, arXiv:2110.06848)."""
    return lse_b2, lse_b2 - pos_b2


def tile_lse(s: Tensor, alpha: Tensor, side: int) -> Tensor:
    """Returns log Σ exp(α s) over each row of a tile (side 0) or each column (1). α: 0-dim, or one per row (column)."""
    z = s * (alpha if alpha.ndim == 0 else alpha.unsqueeze(1 - side))
    return torch.logsumexp(z, 1 - side)


def tile_softmax(s: Tensor, alpha: Tensor, a_r: Tensor, a_c: Tensor) -> Tensor:
    """Returns exp(α s_ij - ar_i) + exp(α s_ij - ac_j) of a tile. Compiled, it reads and writes a tile once."""
    z = s * alpha
    return (z - a_r[:, None]).exp() + (z - a_c).exp()


def tile_softmax_(s: Tensor, alpha: Tensor, a_r: Tensor, a_c: Tensor) -> Tensor:
    """`tile_softmax` for eager code, which overwrites s instead of allocating four tiles."""
    z = s.mul_(alpha)
    return (z - a_r[:, None]).exp_().add_(z.sub_(a_c).exp_())


@dataclass(frozen=True, slots=True)
class Tiling:
    """Edge of the square tiles, their matrix products, and the functions that are computed on each tile."""

    size: int
    products: Products = EXACT
    lse: Callable[[Tensor, Tensor, int], Tensor] = tile_lse
    softmax: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = tile_softmax_

    def compiled(self, compiler: Compiler) -> Tiling:
        return replace(self, lse=compiler(tile_lse), softmax=compiler(tile_softmax))


class TiledObjective(Objective):
    """Base class of objectives over the tiles of this kernel, whose functions it can compile."""

    def __init__(self, comm: Comm, tiling: Tiling) -> None:
        super().__init__()
        self.comm, self.tiling = comm, tiling

    def compile_tiles(self, compiler: Compiler) -> None:
        self.tiling = self.tiling.compiled(compiler)


class Contrastive(TiledObjective):
    """A symmetric contrastive loss whose normaliser depends on the batch alone."""

    def __init__(self, comm: Comm, temperature: Temperature, normaliser: Normaliser, tiling: Tiling) -> None:
        super().__init__(comm, tiling)
        self.normaliser, self.temperature = normaliser, temperature

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        scale = self.temperature()
        loss = contrastive_loss(inputs.image, inputs.text, scale, self.normaliser, self.comm, self.tiling)
        return loss, {"temperature": 1 / scale.detach()}

    def after_step(self, samples_seen: int, found_inf: Tensor | None = None) -> None:
        self.temperature.after_step()


def contrastive_loss(
    image_bD: Tensor, text_bD: Tensor, scale: Tensor, normaliser: Normaliser, comm: Comm, tiling: Tiling
) -> Tensor:
    """Returns the global loss, 0-dim, at one temperature for all pairs (`scale`: α, 0-dim). Collective.

    Gradients: see `Objective`.
    """

    def of_pairs(pairs: Pairs, alpha: Tensor) -> Scored:
        lse_b2 = pairs.lse(alpha)
        a_b2, loss_b2 = normaliser(lse_b2, alpha * pairs.own().expand(-1, 2), pairs)
        a_rB, a_cB, loss_B = comm.gather(torch.cat([a_b2, loss_b2.mean(1, keepdim=True)], 1)).unbind(1)

        def softmax(tile: Tile) -> Tensor:
            return pairs.softmax(tile, alpha, a_rB[tile.rows], a_cB[tile.cols])

        own_b1 = -(lse_b2 - a_b2).exp().sum(1, keepdim=True)
        return loss_B.mean(), pairs.gradients_with_scale(softmax, own_b1, alpha, 2 * pairs.batch), ()

    return pair_loss(of_pairs, image_bD, text_bD, (scale,), comm, tiling)[0]


def individual_loss(
    image_bD: Tensor,
    text_bD: Tensor,
    scale_b2: Tensor,
    weight_b2: Tensor,
    normaliser: Normaliser,
    comm: Comm,
    tiling: Tiling,
) -> tuple[Tensor, Tensor]:
    """`contrastive_loss` with a constant α and a constant weight of the gradient for each row and column. Collective.

    Returns the loss, and Σ_{j≠i} exp(z_ij - a_i)·(z_ij - pos_i) of each row and column, [b, 2], from which the gradient
    with respect to a sample's temperature is computed. The second output has no gradient.
    """

    def of_pairs(pairs: Pairs) -> Scored:
        alpha_b2 = scale_b2.to(pairs.dtype)
        weight = weight_b2.to(pairs.dtype) * alpha_b2
        pos_b2, lse_b2 = alpha_b2 * pairs.own(), pairs.lse(alpha_b2)
        a_b2, loss_b2 = normaliser(lse_b2, pos_b2, pairs)
        # Folds a row's weight and α into its exponent, so that the tiles need the same statistics as with one α.
        shifted_b2 = a_b2 - weight.log()
        stats = comm.gather(torch.cat([shifted_b2, alpha_b2, loss_b2.mean(1, keepdim=True)], 1))
        shifted_B2, alpha_B2, loss_B1 = stats.split(2, 1)
        expected_b2 = torch.zeros_like(lse_b2)  # Σ_j exp(z_ij - a_i) z_ij, i ≠ j

        def softmax(tile: Tile) -> Tensor:
            s = pairs.similarities(tile)
            out = torch.zeros_like(s)
            for side in (0, 1):
                part = tile.part(side)
                z = s * alpha_B2[part, side].unsqueeze(1 - side)
                p = (z - shifted_B2[part, side].unsqueeze(1 - side)).exp_()
                out += p
                if side in tile.own_sides():
                    pz = p.mul_(z)
                    diagonal(pz, tile).zero_()
                    expected_b2[pairs.local(part), side] += pz.sum(1 - side)
            return out

        gradients = pairs.gradients(softmax, -(lse_b2 - shifted_b2).exp().sum(1, keepdim=True))
        tilt_b2 = expected_b2 / weight - pos_b2 * (lse_b2 - a_b2).exp()
        return loss_B1.mean(), [d.div_(2 * pairs.batch) for d in gradients], (tilt_b2,)

    loss, tilt_b2 = pair_loss(of_pairs, image_bD, text_bD, (), comm, tiling)
    return loss, tilt_b2


def pair_loss(
    of_pairs: Callable[..., Scored],
    image_bD: Tensor,
    text_bD: Tensor,
    parameters: Sequence[Tensor],
    comm: Comm,
    tiling: Tiling,
) -> tuple[Tensor, ...]:
    """Returns the loss and the further outputs of `of_pairs`, a function of (pairs, *parameters in their dtype).

    It computes the gradients together with the loss, without TF32, and backward only scales them: the gathered features
    are freed before the towers' backward needs the memory. There is no second derivative: `create_graph=True` raises
    RuntimeError. Collective.
    """
    found: tuple[Tensor, ...] = _pair_loss(image_bD, text_bD, *parameters, (of_pairs, comm, tiling))
    return found


class _PairLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *tensors, (of_pairs, comm, tiling) = inputs
        image, text, *parameters = tensors
        with full_precision(image.device.type):
            pairs = Pairs.gather(image, text, comm, tiling)
            loss, gradients, more = of_pairs(pairs, *(parameter.to(pairs.dtype) for parameter in parameters))
        ctx.save_for_backward(*(g.to(x.dtype) for g, x in zip(gradients, tensors, strict=True)))
        ctx.mark_non_differentiable(*more)
        return loss, *more

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Under create_graph=True alone. once_differentiable would not raise: the gradient of a loss, 1, has no graph.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True needs the second derivative of the loss, which clipx's objectives do not have and "
                "would count as zero: differentiate once, or write the objective in plain torch operations"
            )
        return (*(grads[0] * saved for saved in ctx.saved_tensors), None)


_pair_loss = torch.compiler.disable(_PairLoss.apply)  # collectives and state: runs in eager mode


# --------------------------------------------------------------------------------------------------- the tiles


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of the [B, B] matrix: images `rows`, texts `cols`. `own_*`: whether they belong to this rank."""

    rows: slice
    cols: slice
    own_rows: bool
    own_cols: bool

    def part(self, side: int) -> slice:
        return self.cols if side else self.rows

    def own_sides(self) -> list[int]:
        """Returns the sides that belong to this rank. 0: the rows; 1: the columns."""
        return [side for side, own in enumerate((self.own_rows, self.own_cols)) if own]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs that this rank scores: its images with all texts, and its texts with all images.

    The block of its images with its texts is scored once for both. float32, or float64 for float64 features. Each image
    has k = `texts` consecutive texts: the rows of `y_bD` and `y_BD` are so many times those of `x_bD` and `x_BD`.
    """

    x_bD: Tensor
    y_bD: Tensor
    x_BD: Tensor
    y_BD: Tensor
    left_BK: Tensor  # x_BD and y_BD in the format in which `products` scores them
    right_BK: Tensor
    first: int  # position of this rank's first sample in the global batch
    tiling: Tiling
    products: Products

    @classmethod
    def gather(cls, image_bD: Tensor, text_bD: Tensor, comm: Comm, tiling: Tiling) -> Pairs:
        """Gathers the features of all ranks in one collective. Raises ConfigError for a global batch of one sample."""
        batch = comm.world * len(image_bD)
        require(batch >= 2, f"a global batch of {batch} has no negatives: give data.batch_size of at least 2")
        dtype = torch.promote_types(image_bD.dtype, torch.float32)
        x_bD, y_bD = image_bD.detach().to(dtype), text_bD.detach().to(dtype)
        x_BD, y_BD = comm.gather_coalesced(x_bD, y_bD.reshape(len(x_bD), -1))  # the texts of an image beside each other
        y_BD = y_BD.reshape(-1, y_bD.shape[1])
        products = tiling.products if dtype is torch.float32 else EXACT
        left_BK, right_BK = products.left(x_BD), products.right(y_BD)
        return cls(x_bD, y_bD, x_BD, y_BD, left_BK, right_BK, comm.rank * len(x_bD), tiling, products)

    @property
    def batch(self) -> int:
        return len(self.x_BD)

    @property
    def dtype(self) -> torch.dtype:
        return self.x_bD.dtype

    @property
    def texts(self) -> int:
        """Number of texts of each image."""
        return len(self.y_bD) // len(self.x_bD)

    def own(self) -> Tensor:
        """Returns s of this rank's images and their own texts, [b, k]."""
        return (self.x_bD[:, None] * self.y_bD.reshape(len(self.x_bD), self.texts, -1)).sum(2)

    def tiles(self) -> Iterator[Tile]:
        """Yields the tiles in this rank's rows or columns, each once."""
        (own_rows, other_rows), (own_cols, other_cols) = (self._parts(self.first * n, n) for n in (1, self.texts))
        yield from (Tile(rows, cols, True, True) for rows in own_rows for cols in own_cols)
        yield from (Tile(rows, cols, True, False) for rows in own_rows for cols in other_cols)
        yield from (Tile(rows, cols, False, True) for rows in other_rows for cols in own_cols)

    def _parts(self, first: int, each: int) -> tuple[list[slice], list[slice]]:
        """Returns the edges of the tiles of this rank's images or texts, from `first`, and those of the other ranks.

        `each`: number of rows or columns of an image.
        """
        end, size = first + each * len(self.x_bD), self.tiling.size
        return _cut(first, end, size), _cut(0, first, size) + _cut(end, each * self.batch, size)

    def local(self, part: slice, each: int = 1) -> slice:
        """Returns the position in the local batch of a slice of the global batch that belongs to this rank.

        `each`: number of rows or columns of an image.
        """
        return slice(part.start - self.first * each, part.stop - self.first * each)

    def similarities(self, tile: Tile) -> Tensor:
        """Returns s of a tile."""
        return self.products.scores(self.left_BK[tile.rows], self.right_BK[tile.cols])

    def softmax(self, tile: Tile, alpha: Tensor, a_r: Tensor, a_c: Tensor) -> Tensor:
        """Returns exp(α s_ij - ar_i) + exp(α s_ij - ac_j) of a tile."""
        if self.products.fused:
            return self.products.softmax(self.left_BK[tile.rows], self.right_BK[tile.cols], alpha, a_r, a_c)
        return self.tiling.softmax(self.similarities(tile), alpha, a_r, a_c)

    def lse(self, scale: Tensor) -> Tensor:
        """Returns ℓ_b2 of this rank's rows and columns. `scale`: α, 0-dim, or [b, 2] with one per row and column."""
        lse_b2 = self.x_bD.new_full((len(self.x_bD), 2), -torch.inf)
        for tile in self.tiles():
            for side, tile_lse in self._tile_lse(tile, scale).items():
                mine = self.local(tile.part(side))
                lse_b2[mine, side] = torch.logaddexp(lse_b2[mine, side], tile_lse)
        return lse_b2

    def _tile_lse(self, tile: Tile, scale: Tensor) -> dict[int, Tensor]:
        """Returns the log-sum-exp over the negatives within a tile, for each of its sides that belongs to this rank."""
        if self.products.fused and scale.ndim == 0:
            offset = tile.rows.start - tile.cols.start
            both = self.products.lse(self.left_BK[tile.rows], self.right_BK[tile.cols], scale, offset)
            return {side: both[side] for side in tile.own_sides()}
        s = self.similarities(tile)
        diagonal(s, tile).fill_(-torch.inf)  # masked before logsumexp takes the maximum
        scales = [scale if scale.ndim == 0 else scale[self.local(tile.part(side)), side] for side in tile.own_sides()]
        return {side: self.tiling.lse(s, alpha, side) for side, alpha in zip(tile.own_sides(), scales, strict=True)}

    def gradients(self, weights: Callable[[Tile], Tensor], own_bk: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (Σ_j g_ij y_j, Σ_i g_ij x_i) of this rank's images and texts, [b, D] and [kb, D].

        g is `weights(tile)`, and `own_bk` for the own pairs, where `weights` is 0 if an image has several texts.
        """
        # The own pairs have the largest weights of a row, about minus the sum of all others: added in full precision.
        dx_bD = (own_bk[..., None] * self.y_bD.reshape(len(self.x_bD), self.texts, -1)).sum(1)
        dy_mD = (own_bk[..., None] * self.x_bD[:, None]).flatten(0, 1)
        for tile in self.tiles():
            g = weights(tile)
            if self.texts == 1:
                diagonal(g, tile).zero_()
            if tile.own_rows:
                self.products.add(dx_bD[self.local(tile.rows)], g, self.y_BD[tile.cols])
            if tile.own_cols:
                self.products.add(dy_mD[self.local(tile.cols, self.texts)], g.T, self.x_BD[tile.rows])
        return dx_bD, dy_mD

    def gradients_with_scale(
        self, weights: Callable[[Tile], Tensor], own_bk: Tensor, alpha: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients with respect to images, texts and α of a mean over `count`, whose gradients with
        respect to the logits z are those of `gradients`."""
        dx_bD, dy_mD = (d.mul_(alpha / count) for d in self.gradients(weights, own_bk))
        return dx_bD, dy_mD, torch.dot(self.x_bD.flatten(), dx_bD.flatten()) / alpha


def _cut(start: int, stop: int, tile: int) -> list[slice]:
    return [slice(at, min(at + tile, stop)) for at in range(start, stop, tile)]


def diagonal(tile_rc: Tensor, tile: Tile) -> Tensor:
    """Returns a view of the matrix's diagonal within a tile; empty for most tiles."""
    offset = tile.rows.start - tile.cols.start
    if not -tile_rc.shape[0] < offset < tile_rc.shape[1]:
        return tile_rc.new_empty(0)
    return tile_rc.diagonal(offset)
