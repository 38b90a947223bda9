"""InfoNCE, distillation from a teacher's softmaxes, on the tiles of the contrastive kernel, and the distance of the
embeddings from the teacher's.

Notation of `contrastive`; w_ij are the teacher's logits, p its softmax over a row or a column. For a row, with q_i the
probability that the teacher assigns to negatives,

    -Σ_j p_ij log softmax(z_i)_j = a_i - Σ_j p_ij z_ij = (a_i - z_ii) + q_i z_ii - Σ_{j≠i} p_ij z_ij

and its gradient with respect to z_ij is softmax(z_i)_j - p_ij, so that a tile of the teacher's pairs is scored with
each tile of the student's. Both are linear in p: the mean of the losses of K teachers has p̄, the mean of their
softmaxes, in place of p, and q̄ in place of q. Communication: 2 + K all_gathers (the features of the student, those of
each teacher, and 2 + 2K numbers per sample) and one sum of the losses. The distance of the embeddings is a mean over
samples: one further sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.objective.base import Metrics, StepInputs
from clipx.objective.losses.contrastive import (
    Pairs,
    Scored,
    Tile,
    TiledObjective,
    Tiling,
    contrastive_loss,
    diagonal,
    in_batch,
    pair_loss,
)
from clipx.objective.losses.temperature import Temperature

Weights = tuple[float, float]
"""Weights of the contrastive loss and of the distillation loss."""


class Distillation(TiledObjective):
    """InfoNCE and distillation with one learned temperature, and the distance of the embeddings from the teachers'.

    Targets: image_bT and text_bT of each teacher, whose products are its logits.
    """

    def __init__(
        self, comm: Comm, temperature: Temperature, weights: Weights, by_distance: float, tiling: Tiling
    ) -> None:
        super().__init__(comm, tiling)
        self.weights, self.by_distance, self.temperature = weights, by_distance, temperature

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        scale = self.temperature()
        loss, parts = self._of_pairs(inputs, scale)
        if self.by_distance:
            distance = embedding_distance(inputs.image, inputs.text, inputs.targets, self.comm)
            parts["embedding_distance"] = distance.detach()
            loss = loss + self.by_distance * distance
        return loss, {**parts, "temperature": 1 / scale.detach()}

    def _of_pairs(self, inputs: StepInputs, scale: Tensor) -> tuple[Tensor, Metrics]:
        """Returns the weighted losses over all pairs, and these without weights."""
        if not self.weights[1]:
            loss = contrastive_loss(inputs.image, inputs.text, scale, in_batch, self.comm, self.tiling)
            return self.weights[0] * loss, {"contrastive_loss": loss.detach()}
        loss, contrastive, distill = distillation_loss(
            inputs.image, inputs.text, scale, inputs.targets, self.weights, self.comm, self.tiling
        )
        return loss, {"contrastive_loss": contrastive, "distill_loss": distill}

    def after_step(self, samples_seen: int, found_inf: Tensor | None = None) -> None:
        self.temperature.after_step()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def embedding_distance(image_bD: Tensor, text_bD: Tensor, taught: Sequence[Tensor], comm: Comm) -> Tensor:
    """Returns 1 - the cosine of an embedding and the teacher's, 0-dim: the mean over the global batch, over images and
    texts, and over all teachers.

    `taught`: image_bD and text_bD of each teacher, of any norm. Gradients: see `Objective`. Collective.
    """
    wide = torch.promote_types(image_bD.dtype, torch.float32)
    own = (image_bD.to(wide), text_bD.to(wide))
    cosines = [
        (own[i % 2] * F.normalize(target.to(torch.promote_types(target.dtype, wide)), dim=1)).sum()
        for i, target in enumerate(taught)
    ]
    rank_mean = 1 - torch.stack(cosines).sum() / (len(taught) * len(image_bD))
    share = rank_mean / comm.world
    return comm.sum(share.detach()) + (share - share.detach())  # equal on all ranks, with the gradient of this rank


def distillation_loss(
    image_bD: Tensor,
    text_bD: Tensor,
    scale: Tensor,
    taught: Sequence[Tensor],
    weights: Weights,
    comm: Comm,
    tiling: Tiling,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the global loss, and its unweighted contrastive and distillation parts without gradient; 0-dim each.

    `scale`: α, 0-dim. `taught`: image_bT and text_bT of each teacher, whose widths T may differ. Gradients: see
    `Objective`; the teachers get none. Collective.
    """

    def of_pairs(pairs: Pairs, alpha: Tensor) -> Scored:
        given = [target.to(pairs.dtype) for target in taught]
        teachers = [Pairs.gather(*two, comm, tiling) for two in zip(given[::2], given[1::2], strict=True)]
        by_contrast, by_teacher = weights
        lse_b2, pos_b2, a_b2 = _normalisers(pairs, alpha)
        of_teachers = [_normalisers(teacher, torch.ones_like(alpha)) for teacher in teachers]
        q_b2 = torch.stack([(lse - a).exp() for lse, _, a in of_teachers]).mean(0)
        stats = comm.gather(torch.cat([a_b2, *(a for _, _, a in of_teachers)], 1))
        softmaxes = _Softmaxes(alpha, weights, stats.split(2, 1), pairs, teachers)
        # The off-diagonal mass of both softmaxes, not 1 - p, which rounds to 0 for a pair that is well learned.
        wrong_b2 = (by_contrast + by_teacher) * (lse_b2 - a_b2).exp() - by_teacher * q_b2
        own_b1 = -wrong_b2.sum(1, keepdim=True)
        gradients = pairs.gradients_with_scale(softmaxes, own_b1, alpha, 2 * pairs.batch)
        own_b2 = a_b2 - pos_b2
        taught_b2 = own_b2 + q_b2 * pos_b2 - softmaxes.expected_b2
        contrast, distill = (comm.sum(torch.stack([own_b2.sum(), taught_b2.sum()])) / (2 * pairs.batch)).unbind()
        return by_contrast * contrast + by_teacher * distill, gradients, (contrast, distill)

    loss, contrast, distill = pair_loss(of_pairs, image_bD, text_bD, (scale,), comm, tiling)
    return loss, contrast, distill


def _normalisers(pairs: Pairs, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (ℓ, pos, a) of this rank's rows and columns, [b, 2] each."""
    lse_b2, pos_b2 = pairs.lse(scale), scale * pairs.own().expand(-1, 2)
    return lse_b2, pos_b2, in_batch(lse_b2, pos_b2, pairs)[0]


class _Softmaxes:
    """Weights of a tile: (c + d)·softmax(z) - d·p̄, the sum of that over rows and that over columns.

    c and d are the weights of the two losses. Accumulates Σ_j p̄_ij z_ij, i ≠ j, of this rank's rows and columns in
    `expected_b2`. `stats`: log-normalisers [B, 2] of the student and of each teacher.
    """

    def __init__(
        self, alpha: Tensor, weights: Weights, stats: Sequence[Tensor], pairs: Pairs, taught: Sequence[Pairs]
    ) -> None:
        self.alpha, self.pairs = alpha, pairs
        self.both, self.by_teacher = sum(weights), weights[1]
        self.a_B2, self.teachers = stats[0], list(zip(taught, stats[1:], strict=True))
        self.expected_b2 = pairs.x_bD.new_zeros((len(pairs.x_bD), 2))

    def __call__(self, tile: Tile) -> Tensor:
        s = self.pairs.similarities(tile)
        z = s * self.alpha
        a_r, a_c = self.a_B2[tile.rows, 0], self.a_B2[tile.cols, 1]
        g = self.pairs.tiling.softmax(s, self.alpha, a_r, a_c).mul_(self.both)
        share = 1 / len(self.teachers)
        for taught, taught_a_B2 in self.teachers:
            w = taught.similarities(tile)
            for side in (0, 1):
                part = tile.part(side)
                p = (w - taught_a_B2[part, side].unsqueeze(1 - side)).exp_()
                g.sub_(p, alpha=self.by_teacher * share)
                if side in tile.own_sides():
                    pz = p.mul_(z)
                    diagonal(pz, tile).zero_()
                    self.expected_b2[self.pairs.local(part), side] += share * pz.sum(1 - side)
        return g
