"""The sigmoid loss over all pairs (arXiv:2303.15343), on the tiles of the contrastive kernel: one pass, one all_gather.

With z_ij = α s_ij + β, B·loss = -Σ_{i≠j} log σ(-z_ij) - Σ_i log σ(z_ii); B·dz_ij = σ(z_ij) and B·dz_ii = -σ(-z_ii).

With several right pairs, in the notation of positives.py: -Σ log σ(±z) / M over the pairs that are not left out, with
+ for a right pair.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipx.distributed.comm import Comm
from clipx.objective.base import Metrics, Objective, StepInputs
from clipx.objective.losses.contrastive import Pairs, Scored, Tile, Tiling, diagonal, pair_loss
from clipx.objective.losses.positives import Relations
from clipx.objective.losses.temperature import Temperature
from clipx.objective.spec import SameCaption


class Sigmoid(Objective):
    """The sigmoid loss with one learned temperature and one learned bias.

    A step with digests of captions compares them, and takes several captions of an image.
    """

    def __init__(
        self, comm: Comm, temperature: Temperature, init_bias: float, tiling: Tiling, rule: SameCaption
    ) -> None:
        super().__init__()
        self.comm, self.tiling, self.rule = comm, tiling, rule
        self.temperature = temperature
        self.bias = nn.Parameter(torch.tensor(init_bias))

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        scale, relations = self.temperature(), Relations.gather(inputs, self.rule, self.comm)
        loss = sigmoid_loss(inputs.image, inputs.text, scale, self.bias, relations, self.comm, self.tiling)
        learned = {"temperature": 1 / scale.detach(), "bias": self.bias.detach().clone()}
        return loss, learned | (relations.metrics(loss.dtype) if relations else {})

    @torch.no_grad()
    def adopt_bias(self, bias: float) -> bool:
        self.bias.fill_(bias)
        return True

    def after_step(self, samples_seen: int, found_inf: Tensor | None = None) -> None:
        self.temperature.after_step()


def sigmoid_loss(
    image_bD: Tensor,
    text_mD: Tensor,
    scale: Tensor,
    bias: Tensor,
    relations: Relations | None,
    comm: Comm,
    tiling: Tiling,
) -> Tensor:
    """Returns the global loss, 0-dim; `scale` α and `bias` β, 0-dim. Gradients: see `Objective`. Collective.

    `relations`: right and negative pairs. None: the pairs of the diagonal are right, all others negative.
    """

    def of_pairs(pairs: Pairs, alpha: Tensor, beta: Tensor) -> Scored:
        z_bk = alpha * pairs.own() + beta
        own_bk = -torch.sigmoid(-z_bk)  # not σ - 1, which rounds to 0 for a pair that is well learned
        # Sums over the pairs of this rank's images, without the own ones: of -log σ(∓z), and of the weights.
        others, total = torch.zeros_like(alpha), torch.zeros_like(alpha)

        def weights(tile: Tile) -> Tensor:
            """Returns σ(z) of a negative, -σ(-z) of a right pair."""
            wrong = pairs.similarities(tile).mul_(alpha).add_(beta)
            if relations is None:
                diagonal(wrong, tile).fill_(-torch.inf)
                g = wrong.sigmoid()
            else:
                right_rc, negative_rc = relations.classify(tile)
                wrong = torch.where(right_rc, -wrong, wrong).masked_fill_(~(right_rc | negative_rc), -torch.inf)
                g = torch.where(right_rc, -wrong.sigmoid(), wrong.sigmoid())
            if tile.own_rows:
                others.sub_(F.logsigmoid(wrong.neg_()).sum())
                total.add_(g.sum())
            return g

        texts = pairs.batch * pairs.texts
        gradients = pairs.gradients_with_scale(weights, own_bk, alpha, texts)
        loss = comm.sum(others - F.logsigmoid(z_bk).sum()) / texts  # each rank: the pairs of its images
        return loss, (*gradients, (total + own_bk.sum()) / texts), ()

    return pair_loss(of_pairs, image_bD, text_mD, (scale, bias), comm, tiling)[0]
