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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.errors import require
from clipx.objective.base import Compiler, Metrics, Objective, ScalarLoss, StepInputs
from clipx.objective.losses.products import EXACT, Products, full_precision
from clipx.objective.losses.temperature import Temperature

Normaliser = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(ℓ_b2, pos_b2, B) -> (a_b2, loss_b2); column 0 is the image's row, 1 the text's. The loss is that of each sample."""


class PairNormaliser:
    """A `Normaliser` that reads the embeddings: `gathered` is called once in a step, before the normaliser."""

    def gathered(self, pairs: Pairs) -> None:
        raise NotImplementedError

    def __call__(self, lse_b2: Tensor, pos_b2: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def in_batch(lse_b2: Tensor, pos_b2: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Normaliser of the softmax over all pairs of the row (InfoNCE)."""
    a_b2 = torch.logaddexp(lse_b2, pos_b2)
    return a_b2, a_b2 - pos_b2


def negatives_only(lse_b2: Tensor, pos_b2: Tensor, batch: int) -> tuple[Tensor, Tensor]:
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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives and state: runs in eager mode
def contrastive_loss(
    image_bD: Tensor, text_bD: Tensor, scale: Tensor, normaliser: Normaliser, comm: Comm, tiling: Tiling
) -> Tensor:
    """Returns the global loss, 0-dim, at one temperature for all pairs (`scale`: α, 0-dim). Collective.

    Gradients: see `Objective`.
    """
    loss: Tensor = _ContrastiveLoss.apply(image_bD, text_bD, scale, normaliser, comm, tiling)
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    loss, tilt_b2 = _IndividualLoss.apply(image_bD, text_bD, scale_b2, weight_b2, normaliser, comm, tiling)
    return loss, tilt_b2


class _ContrastiveLoss(ScalarLoss):
    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, scale: Tensor, normaliser: Normaliser, comm: Comm, tiling: Tiling
    ) -> Tensor:
        with full_precision(image.device.type):
            pairs = Pairs.gather(image, text, comm, tiling)
            if isinstance(normaliser, PairNormaliser):
                normaliser.gathered(pairs)
            alpha = scale.to(pairs.dtype)
            lse_b2 = pairs.lse(alpha)
            a_b2, loss_b2 = normaliser(lse_b2, alpha * pairs.own()[:, None].expand(-1, 2), pairs.batch)
            stats_B3 = comm.gather(torch.cat([a_b2, loss_b2.mean(1, keepdim=True)], 1))
            if any(ctx.needs_input_grad[:3]):
                diagonal_b = -(lse_b2 - a_b2).exp().sum(1)
                dx, dy = pairs.gradients(_Softmax(alpha, stats_B3[:, :2], pairs), diagonal_b)
                w = alpha / (2 * pairs.batch)
                dx, dy = dx.mul_(w), dy.mul_(w)
                dscale = pairs.dot(dx) / alpha
                ScalarLoss.save(ctx, (image, text, scale), (dx, dy, dscale))
            return stats_B3[:, 2].mean()


class _IndividualLoss(ScalarLoss):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        weight: Tensor,
        normaliser: Normaliser,
        comm: Comm,
        tiling: Tiling,
    ) -> tuple[Tensor, Tensor]:
        with full_precision(image.device.type):
            pairs = Pairs.gather(image, text, comm, tiling)
            alpha_b2, weight_b2 = scale.to(pairs.dtype), weight.to(pairs.dtype)
            pos_b2 = alpha_b2 * pairs.own()[:, None]
            lse_b2 = pairs.lse(alpha_b2)
            a_b2, loss_b2 = normaliser(lse_b2, pos_b2, pairs.batch)
            # Folds a row's weight and α into its exponent, so that the tiles need the same statistics as with one α.
            shifted_b2 = a_b2 - (weight_b2 * alpha_b2).log()
            stats_B5 = comm.gather(torch.cat([shifted_b2, alpha_b2, loss_b2.mean(1, keepdim=True)], 1))
            softmax = _IndividualSoftmax(stats_B5[:, 2:4], stats_B5[:, :2], pairs)
            dx, dy = pairs.gradients(softmax, -(lse_b2 - shifted_b2).exp().sum(1))
            ctx.save_for_backward(*(d.div_(2 * pairs.batch).to(image.dtype) for d in (dx, dy)))
            tilt_b2 = softmax.expected_b2 / (weight_b2 * alpha_b2) - pos_b2 * (lse_b2 - a_b2).exp()
            ctx.mark_non_differentiable(tilt_b2)
            return stats_B5[:, 4].mean(), tilt_b2


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
    has `texts` consecutive texts: the rows of `y_bD` and `y_BD` are so many times those of `x_bD` and `x_BD`, and the
    methods of the diagonal (`own`, `lse`, `gradients`) are for one.
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
        """Returns s_ii of this rank's samples, [b]."""
        return (self.x_bD * self.y_bD).sum(1)

    def dot(self, dx_bD: Tensor) -> Tensor:
        """Returns Σ_i x_i·dx_i over this rank's images, 0-dim."""
        return torch.dot(self.x_bD.flatten(), dx_bD.flatten())

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

    def gradients(self, weights: Callable[[Tile], Tensor], diagonal_b: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (Σ_j g_ij y_j, Σ_i g_ij x_i) of this rank's images and texts, [b, D] each.

        g is `weights(tile)`, except on the diagonal, where it is `diagonal_b`.
        """
        # The diagonal is the largest weight of a row, about minus the sum of all others: it is added in full precision.
        dx_bD, dy_bD = diagonal_b[:, None] * self.y_bD, diagonal_b[:, None] * self.x_bD
        for tile in self.tiles():
            g = weights(tile)
            diagonal(g, tile).zero_()
            if tile.own_rows:
                self.products.add(dx_bD[self.local(tile.rows)], g, self.y_BD[tile.cols])
            if tile.own_cols:
                self.products.add(dy_bD[self.local(tile.cols)], g.T, self.x_BD[tile.rows])
        return dx_bD, dy_bD


class _Softmax:
    """Weights exp(z_ij - ar_i) + exp(z_ij - ac_j) of a tile, at one temperature for all pairs."""

    def __init__(self, alpha: Tensor, a_B2: Tensor, pairs: Pairs) -> None:
        self.alpha, self.a_rB, self.a_cB = alpha, *a_B2.unbind(1)
        self.pairs = pairs

    def __call__(self, tile: Tile) -> Tensor:
        return self.pairs.softmax(tile, self.alpha, self.a_rB[tile.rows], self.a_cB[tile.cols])


class _IndividualSoftmax:
    """Weights exp(αr_i s_ij - ar_i) + exp(αc_j s_ij - ac_j) of a tile.

    Accumulates Σ_j exp(z_ij - a_i) z_ij, i ≠ j, of this rank's rows and columns in `expected_b2`.
    """

    def __init__(self, alpha_B2: Tensor, a_B2: Tensor, pairs: Pairs) -> None:
        self.alpha_B2, self.a_B2, self.pairs = alpha_B2, a_B2, pairs
        self.expected_b2 = pairs.x_bD.new_zeros((len(pairs.x_bD), 2))

    def __call__(self, tile: Tile) -> Tensor:
        s = self.pairs.similarities(tile)
        out = torch.zeros_like(s)
        for side in (0, 1):
            part = tile.part(side)
            z = s * self.alpha_B2[part, side].unsqueeze(1 - side)
            p = (z - self.a_B2[part, side].unsqueeze(1 - side)).exp_()
            out += p
            if side in tile.own_sides():
                pz = p.mul_(z)
                diagonal(pz, tile).zero_()
                self.expected_b2[self.pairs.local(part), side] += pz.sum(1 - side)
        return out


def _cut(start: int, stop: int, tile: int) -> list[slice]:
    return [slice(at, min(at + tile, stop)) for at in range(start, stop, tile)]


def diagonal(tile_rc: Tensor, tile: Tile) -> Tensor:
    """Returns a view of the matrix's diagonal within a tile; empty for most tiles."""
    offset = tile.rows.start - tile.cols.start
    if not -tile_rc.shape[0] < offset < tile_rc.shape[1]:
        return tile_rc.new_empty(0)
    return tile_rc.diagonal(offset)
