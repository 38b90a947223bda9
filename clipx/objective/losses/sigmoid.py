"""The sigmoid loss over all pairs (arXiv:2303.15343), on the tiles of the contrastive kernel: one pass, one all_gather.

With z_ij = α s_ij + β, B·loss = -Σ_{i≠j} log σ(-z_ij) - Σ_i log σ(z_ii); B·dz_ij = σ(z_ij) and B·dz_ii = -σ(-z_ii).

With several right pairs, in the notation of positives.py: -Σ log σ(±z) / M over the pairs that are not left out, with
+ for a right pair.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipx.distributed.comm import Comm
from clipx.objective.base import Metrics, Objective, ScalarLoss, StepInputs
from clipx.objective.losses.contrastive import Pairs, Tile, Tiling, diagonal
from clipx.objective.losses.positives import Relations, gradients, own_scores
from clipx.objective.losses.products import full_precision
from clipx.objective.losses.temperature import Temperature
from clipx.objective.spec import SameCaption


class Sigmoid(Objective):
    """The sigmoid loss with one learned temperature and one learned bias."""

    def __init__(self, comm: Comm, temperature: Temperature, init_bias: float, tiling: Tiling) -> None:
        super().__init__()
        self.comm, self.tiling = comm, tiling
        self.temperature = temperature
        self.bias = nn.Parameter(torch.tensor(init_bias))

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        scale = self.temperature()
        loss = sigmoid_loss(inputs.image, inputs.text, scale, self.bias, self.comm, self.tiling)
        return loss, {"temperature": 1 / scale.detach(), "bias": self.bias.detach().clone()}

    @torch.no_grad()
    def adopt_bias(self, bias: float) -> bool:
        self.bias.fill_(bias)
        return True

    def after_step(self, samples_seen: int, found_inf: Tensor | None = None) -> None:
        self.temperature.after_step()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sigmoid_loss(image_bD: Tensor, text_bD: Tensor, scale: Tensor, bias: Tensor, comm: Comm, tiling: Tiling) -> Tensor:
    """Returns the global loss, 0-dim; `scale` α and `bias` β, 0-dim. Gradients: see `Objective`. Collective."""
    loss: Tensor = _SigmoidLoss.apply(image_bD, text_bD, scale, bias, comm, tiling)
    return loss


class _SigmoidLoss(ScalarLoss):
    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, comm: Comm, tiling: Tiling
    ) -> Tensor:
        with full_precision(image.device.type):
            pairs = Pairs.gather(image, text, comm, tiling)
            alpha, beta = scale.to(pairs.dtype), bias.to(pairs.dtype)
            own_z_b = alpha * pairs.own() + beta
            weights = _Weights(alpha, beta, pairs)
            diagonal_b = -torch.sigmoid(-own_z_b)  # not σ - 1, which rounds to 0 for a pair that is well learned
            dx, dy = pairs.gradients(weights, diagonal_b)
            # Each rank sums over the pairs of its images.
            loss = comm.sum(weights.loss - F.logsigmoid(own_z_b).sum()) / pairs.batch
            dx, dy = dx.mul_(alpha / pairs.batch), dy.mul_(alpha / pairs.batch)
            dbias = (weights.sigmoid + diagonal_b.sum()) / pairs.batch
            ScalarLoss.save(ctx, (image, text, scale, bias), (dx, dy, pairs.dot(dx) / alpha, dbias))
            return loss


class _Weights:
    """Weights σ(z) of a tile. Accumulates the sums of σ(z) and -log σ(-z) over the negatives of this rank's images."""

    def __init__(self, alpha: Tensor, beta: Tensor, pairs: Pairs) -> None:
        self.alpha, self.beta, self.pairs = alpha, beta, pairs
        self.loss, self.sigmoid = torch.zeros_like(alpha), torch.zeros_like(alpha)

    def __call__(self, tile: Tile) -> Tensor:
        z = self.pairs.similarities(tile).mul_(self.alpha).add_(self.beta)
        diagonal(z, tile).fill_(-torch.inf)
        g = z.sigmoid()
        if tile.own_rows:
            self.loss -= F.logsigmoid(z.neg_()).sum()
            self.sigmoid += g.sum()
        return g


# ------------------------------------------------------------------------------------------------- several right pairs


class MultiPositiveSigmoid(Sigmoid):
    """The sigmoid loss. A step with digests of captions compares them, and takes several captions of an image."""

    def __init__(
        self, comm: Comm, temperature: Temperature, init_bias: float, tiling: Tiling, rule: SameCaption
    ) -> None:
        super().__init__(comm, temperature, init_bias, tiling)
        self.rule = rule

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        if inputs.captions is None:
            assert self.rule is SameCaption.negative, "the batch lacks the digests of its captions"
            return super().forward(inputs)
        scale = self.temperature()
        relations = Relations.gather(inputs, self.rule, self.comm)
        loss = multi_positive_sigmoid(inputs.image, inputs.text, scale, self.bias, relations, self.comm, self.tiling)
        learned = {"temperature": 1 / scale.detach(), "bias": self.bias.detach().clone()}
        return loss, learned | relations.metrics(loss.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def multi_positive_sigmoid(
    image_bD: Tensor, text_mD: Tensor, scale: Tensor, bias: Tensor, relations: Relations, comm: Comm, tiling: Tiling
) -> Tensor:
    """Returns the global sigmoid loss of `relations`, 0-dim; `scale` α and `bias` β, 0-dim. Gradients: see `Objective`.
    Collective."""
    loss: Tensor = _MultiPositiveSigmoid.apply(image_bD, text_mD, scale, bias, relations, comm, tiling)
    return loss


class _MultiPositiveSigmoid(ScalarLoss):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        bias: Tensor,
        relations: Relations,
        comm: Comm,
        tiling: Tiling,
    ) -> Tensor:
        with full_precision(image.device.type):
            pairs = Pairs.gather(image, text, comm, tiling)
            alpha, beta = scale.to(pairs.dtype), bias.to(pairs.dtype)
            z_bk = alpha * own_scores(pairs) + beta
            own_bk = -torch.sigmoid(-z_bk)
            weights = _SigmoidWeights(alpha, beta, pairs, relations)
            dx, dy = gradients(pairs, weights, own_bk)
            texts = pairs.batch * pairs.texts
            loss = comm.sum(weights.loss - F.logsigmoid(z_bk).sum()) / texts  # each rank: the pairs of its images
            dx, dy = dx.mul_(alpha / texts), dy.mul_(alpha / texts)
            dbias = (weights.total + own_bk.sum()) / texts
            ScalarLoss.save(ctx, (image, text, scale, bias), (dx, dy, pairs.dot(dx) / alpha, dbias))
            return loss


class _SigmoidWeights:
    """Weights of a tile: σ(z) of a negative, -σ(-z) of a right pair. Accumulates their sum and the loss over the pairs
    of this rank's images, without the own ones."""

    def __init__(self, alpha: Tensor, beta: Tensor, pairs: Pairs, relations: Relations) -> None:
        self.alpha, self.beta, self.pairs, self.relations = alpha, beta, pairs, relations
        self.loss, self.total = torch.zeros_like(alpha), torch.zeros_like(alpha)

    def __call__(self, tile: Tile) -> Tensor:
        right_rc, negative_rc = self.relations.of(tile)
        z = self.pairs.similarities(tile) * self.alpha + self.beta
        wrong = torch.where(right_rc, -z, z).masked_fill_(~(right_rc | negative_rc), -torch.inf)
        g = torch.where(right_rc, -wrong.sigmoid(), wrong.sigmoid())
        if tile.own_rows:
            self.loss -= F.logsigmoid(-wrong).sum()
            self.total += g.sum()
        return g
