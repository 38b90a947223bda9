"""InfoNCE with several right texts for an image, and several right images for a text. The sigmoid loss: sigmoid.py.

A rank scores the tiles of the contrastive kernel. Image i has k texts of the global batch, which are its own: they are
right. The texts of another row with the same sample are right too. A text with the caption of another sample is a
negative, is left out, or is right, as objective.same_caption says.

Notation: b images of this rank, B of the global batch, k texts of each image, m = kb and M = kB texts, r rows and c
columns of a tile, D embedding, z_ij = α s_ij (+ β). Of a row or a column: n the number of its right pairs, ℓn the
log-sum-exp of z over its negatives, ℓp over its right pairs, a = log(e^ℓn + e^ℓp), q = exp(ℓn - a)/n the probability
that the negatives take from each right pair, p̄ = exp(ℓp - a)/n the mean probability of the right pairs.

    InfoNCE: ½ mean over images of (a - mean of z over the right texts) + ½ the same mean over the M texts
             2B · dz_ij = g_ij of the row + g_ij of the column / k
             g = exp(z - a) for a negative, (exp(z - a) - p̄) - q for a right pair, 0 for a pair that is left out

With one right pair p̄ is exp(z - a) exactly, and g is -q, which does not round to 0 for a pair that is well learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.model.transfer import moved
from clipx.objective.base import Compiler, Metrics, StepInputs
from clipx.objective.losses.contrastive import Contrastive, Pairs, Scored, Tile, Tiling, in_batch, pair_loss
from clipx.objective.losses.temperature import Temperature
from clipx.objective.spec import SameCaption


@dataclass(frozen=True, slots=True)
class Relations:
    """Right, negative and left-out pairs of the global batch. int64: samples and digests of captions."""

    sample_B: Tensor
    caption_Bk: Tensor
    rule: SameCaption

    @classmethod
    def gather(cls, inputs: StepInputs, rule: SameCaption, comm: Comm) -> Relations | None:
        """Gathers the samples and captions of all ranks in one collective. None for a step without digests of
        captions, where an image has one text and all others are negatives."""
        if inputs.captions is None:
            assert rule is SameCaption.negative, "the batch lacks the digests of its captions"
            return None
        own = torch.cat([inputs.index[:, None], inputs.captions], 1)
        gathered = comm.gather(moved(own, inputs.image.device))
        return cls(gathered[:, 0], gathered[:, 1:].contiguous(), rule)

    def classify(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Returns (right_rc, negative_rc) of a tile, boolean. An image's own texts are neither."""
        k, device = self.caption_Bk.shape[1], self.sample_B.device
        row_r = torch.arange(tile.rows.start, tile.rows.stop, device=device)[:, None]
        image_c = torch.arange(tile.cols.start, tile.cols.stop, device=device).div(k, rounding_mode="floor")
        right_rc = self.sample_B[row_r] == self.sample_B[image_c]
        other_rc = ~right_rc
        if self.rule is not SameCaption.negative:
            equal_rc = self._equal(tile)
            other_rc &= ~equal_rc
            if self.rule is SameCaption.positive:
                right_rc |= equal_rc
        return right_rc & (row_r != image_c), other_rc

    def _equal(self, tile: Tile) -> Tensor:
        """Returns whether an image of a tile has the caption of a text."""
        caption_c = self.caption_Bk.view(-1)[tile.cols]
        equal_rc = torch.zeros(
            (tile.rows.stop - tile.rows.start, len(caption_c)), dtype=torch.bool, device=caption_c.device
        )
        for caption_r in self.caption_Bk[tile.rows].unbind(1):
            equal_rc |= caption_r[:, None] == caption_c
        return equal_rc

    def metrics(self, dtype: torch.dtype) -> Metrics:
        """Returns shares of the texts: whose caption another sample of the batch has, and that repeat a caption of
        their sample."""
        k = self.caption_Bk.shape[1]
        found = {"shared_captions": self._shared().to(dtype).mean()}
        if k > 1:
            same_Bkk = self.caption_Bk[:, :, None] == self.caption_Bk[:, None]
            found["repeated_captions"] = same_Bkk.tril(-1).any(2).to(dtype).mean()
        return found

    def _shared(self) -> Tensor:
        """Returns whether the caption of a text is that of another sample too, [M], sorted by caption."""
        sample_M, by_sample = self.sample_B.repeat_interleave(self.caption_Bk.shape[1]).sort(stable=True)
        caption_M, order = self.caption_Bk.view(-1)[by_sample].sort(stable=True)
        sample_M = sample_M[order]
        first, last = (torch.searchsorted(caption_M, caption_M, right=right) for right in (False, True))
        return sample_M[first] != sample_M[last - 1]


# ------------------------------------------------------------------------------------------------------- InfoNCE


def tile_sums(s: Tensor, alpha: Tensor, right_rc: Tensor, negative_rc: Tensor, side: int) -> Tensor:
    """Returns (ℓn, ℓp, Σ of z over right pairs, n) of each row of a tile (side 0) or each column (1), [4, rows]."""
    z, across = s * alpha, 1 - side
    return torch.stack(
        [
            z.masked_fill(~negative_rc, -torch.inf).logsumexp(across),
            z.masked_fill(~right_rc, -torch.inf).logsumexp(across),
            z.masked_fill(~right_rc, 0).sum(across),
            right_rc.sum(across).to(z.dtype),
        ]
    )


def tile_weights(
    s: Tensor, alpha: Tensor, right_rc: Tensor, negative_rc: Tensor, row_r3: Tensor, col_c3: Tensor, k: int
) -> Tensor:
    """Returns g of the row + g of the column / k of the pairs of a tile. `row_r3` and `col_c3`: (a, p̄, q)."""
    z, total = s * alpha, torch.zeros_like(s)
    for stats, share in ((row_r3[:, None], 1.0), (col_c3, 1 / k)):
        a, mean, q = stats.unbind(-1)
        p = (z - a).exp()
        total = total + share * torch.where(right_rc, (p - mean) - q, torch.where(negative_rc, p, 0))
    return total


class MultiPositive(Contrastive):
    """InfoNCE. A step with digests of captions compares them, and takes several captions of an image."""

    def __init__(self, comm: Comm, temperature: Temperature, tiling: Tiling, rule: SameCaption) -> None:
        super().__init__(comm, temperature, in_batch, tiling)
        self.rule, self.sums, self.weights = rule, tile_sums, tile_weights

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        relations = Relations.gather(inputs, self.rule, self.comm)
        if relations is None:
            return super().forward(inputs)
        scale = self.temperature()
        loss = self._loss(inputs.image, inputs.text, scale, relations)
        return loss, {"temperature": 1 / scale.detach(), **relations.metrics(loss.dtype)}

    def compile_tiles(self, compiler: Compiler) -> None:
        super().compile_tiles(compiler)
        self.sums, self.weights = compiler(tile_sums), compiler(tile_weights)

    def _loss(self, image_bD: Tensor, text_mD: Tensor, scale: Tensor, relations: Relations) -> Tensor:
        """Returns the global InfoNCE loss of `relations`, 0-dim; `scale`: α, 0-dim. Collective."""

        def of_pairs(pairs: Pairs, alpha: Tensor) -> Scored:
            k, z_bk = pairs.texts, alpha * pairs.own()
            rows, cols = (_Sums.of_own(own) for own in (z_bk, z_bk.reshape(-1, 1)))
            for tile in pairs.tiles():
                s, (right_rc, negative_rc) = pairs.similarities(tile), relations.classify(tile)
                for side in tile.own_sides():
                    sums, each = (cols, k) if side else (rows, 1)
                    sums.add(pairs.local(tile.part(side), each), self.sums(s, alpha, right_rc, negative_rc, side))
            row_b4, col_bk4 = rows.stats(), cols.stats().unflatten(0, (-1, k))
            loss_b1 = (row_b4[:, 3:] + col_bk4[..., 3].mean(1, keepdim=True)) / 2
            stats = self.comm.gather(torch.cat([row_b4[:, :3], col_bk4[..., :3].flatten(1), loss_b1], 1))
            row_B3, col_M3 = stats[:, :3], stats[:, 3:-1].reshape(-1, 3)

            def weights(tile: Tile) -> Tensor:
                s, (right_rc, negative_rc) = pairs.similarities(tile), relations.classify(tile)
                return self.weights(s, alpha, right_rc, negative_rc, row_B3[tile.rows], col_M3[tile.cols], k)

            by_row, by_col = (((z_bk - s[..., 0]).exp() - s[..., 1]) - s[..., 2] for s in (row_b4[:, None], col_bk4))
            gradients = pairs.gradients_with_scale(weights, by_row + by_col / k, alpha, 2 * pairs.batch)
            return stats[:, -1].mean(), gradients, ()

        return pair_loss(of_pairs, image_bD, text_mD, (scale,), self.comm, self.tiling)[0]


@dataclass(slots=True)
class _Sums:
    """ℓn, ℓp, Σ of z over right pairs and n of this rank's rows or columns, [4, N]."""

    sums_4N: Tensor

    @classmethod
    def of_own(cls, z_Nk: Tensor) -> _Sums:
        """Returns the sums over the own pairs alone, which are right."""
        none, count = torch.full_like(z_Nk[:, 0], -torch.inf), torch.full_like(z_Nk[:, 0], z_Nk.shape[1])
        return cls(torch.stack([none, z_Nk.logsumexp(1), z_Nk.sum(1), count]))

    def add(self, part: slice, sums_4n: Tensor) -> None:
        """Adds the sums over the pairs of a tile."""
        mine = self.sums_4N[:, part]
        mine[:2] = torch.logaddexp(mine[:2], sums_4n[:2])
        mine[2:] += sums_4n[2:]

    def stats(self) -> Tensor:
        """Returns (a, p̄, q, loss) of each row or column, [N, 4]."""
        negative, right, total, count = self.sums_4N
        a = torch.logaddexp(negative, right)
        return torch.stack([a, (right - a).exp() / count, (negative - a).exp() / count, a - total / count], 1)
