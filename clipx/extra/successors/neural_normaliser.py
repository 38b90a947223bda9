"""The robust global contrastive loss with a network that predicts each sample's normaliser (NeuCLIP, arXiv:2511.08417).

With g_i = 1/(B-1) Σ_{j≠i} exp(z_ij - pos_i) of the batch, the logarithm of the loss is the minimum over a number a_i,

    log(ε + g_i) = min_a Φ_i(a)        Φ_i(a) = exp(-a)·(ε + g_i) + a - 1        at a = log(ε + g_i)

which is linear in g_i: a batch estimates Φ without bias, and one function a of the sample minimizes its mean over all
batches. The function has the form of the minimizer, with m learned prototypes P_j in place of the other side's
embeddings of the whole data set:

    a_i = log(ε + 1/m Σ_j exp(α cos(x_i, P_j) - pos_i))

Prototypes of texts serve the images' rows, those of images the texts'. A step alternates: it makes some updates of the
prototypes by AdaGrad, which decrease the mean of Φ on its batch, then computes the gradient of the embeddings and of
the temperature with these a_i as constants. No state is stored by sample.

m prototypes, b local batch, B global batch, D embedding, t tile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.extra.successors.neuclip import NeuCLIPSpec
from clipx.objective.base import Metrics, ModelFacts, StepInputs
from clipx.objective.losses.contrastive import Pairs, TiledObjective, Tiling, contrastive_loss
from clipx.objective.losses.fcco import robust, scale_gradient
from clipx.objective.losses.temperature import Temperature

_ADAGRAD_EPS = 1e-10


class NeuCLIP(TiledObjective):
    """The robust global contrastive loss τ (½mean Φ + ρ) with predicted normalisers and one temperature.

    `restart`: samples between two replacements of all prototypes by embeddings. None: only in the first steps.
    """

    def __init__(
        self,
        comm: Comm,
        tiling: Tiling,
        temperature: Temperature,
        rho: float,
        options: NeuCLIPSpec,
        restart: int | None,
    ) -> None:
        super().__init__(comm, tiling)
        self.temperature, self.combine, self.options = temperature, robust(rho), options
        self.restart = restart
        self.seen = 0
        self._pending: tuple[Tensor, Tensor] | None = None  # prototypes and squares after the step, until after_step

    def prepare(self, classes: object, model: ModelFacts) -> None:
        """Creates the prototypes [2, m, D] of texts and images, the same on each rank, and AdaGrad's sums of squares.

        The first step replaces them by embeddings; if it is skipped, random directions remain.
        """
        generator = torch.Generator().manual_seed(0)
        random_mD = torch.randn(self.options.prototypes, model.embed_dim, generator=generator, device="cpu")
        self.prototypes_2mD: Tensor
        self.squares_2mD: Tensor
        self.register_buffer("prototypes_2mD", torch.stack([random_mD, random_mD]))
        self.register_buffer("squares_2mD", torch.zeros_like(self.prototypes_2mD))

    def before_step(self, samples_seen: int) -> None:
        self.seen = samples_seen
        self.temperature.before_step()

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        alpha = self.temperature()
        state = self.prototypes_2mD, self.squares_2mD
        normaliser = PrototypeNormaliser(*state, alpha.detach(), self.seen, self.options, self.restart, self.comm)
        contrast = contrastive_loss(inputs.image, inputs.text, alpha, normaliser, self.comm, self.tiling)
        self._pending = normaliser.prototypes_2mD, normaliser.squares_2mD
        sums_2 = self.comm.sum(torch.stack([normaliser.a_b2.mean(), normaliser.error_b2.mean()]))
        log_normaliser, error = (sums_2 / self.comm.world).unbind()
        loss = self.combine(contrast, scale_gradient(alpha, 1 / self.comm.world), log_normaliser)
        metrics = {"log_normaliser": log_normaliser, "normaliser_error": error}
        return loss, {"temperature": 1 / alpha.detach(), **metrics}

    def after_step(self, samples_seen: int, found_inf: Tensor | None = None) -> None:
        if self._pending is not None:
            for state, moved in zip((self.prototypes_2mD, self.squares_2mD), self._pending, strict=True):
                state.copy_(moved if found_inf is None else torch.where(found_inf == 0, moved, state))
            self._pending = None
        self.temperature.after_step()


class PrototypeNormaliser:
    """The normaliser of one step. Replaces prototypes if it is time, updates them, and predicts a_i with them."""

    def __init__(
        self,
        prototypes_2mD: Tensor,
        squares_2mD: Tensor,
        alpha: Tensor,
        seen: int,
        options: NeuCLIPSpec,
        restart: int | None,
        comm: Comm,
    ) -> None:
        """Stores the state before the step, which stays unchanged. `alpha`: α, 0-dim. `seen`: samples seen before."""
        self.prototypes_2mD, self.squares_2mD = prototypes_2mD.clone(), squares_2mD.clone()
        self.seen, self.options, self.restart, self.comm = seen, options, restart, comm
        self.alpha = alpha.to(prototypes_2mD.dtype)
        self.log_eps = alpha.new_full((), math.log(options.eps) if options.eps else -math.inf)

    def _restart(self, pairs: Pairs) -> None:
        """Replaces the prototypes that this step restarts by embeddings of the batch."""
        batch, count = pairs.batch, self.options.prototypes
        position = self.seen if self.restart is None else self.seen % self.restart
        start = position // batch * batch
        stop = count if self.seen == 0 else min(start + batch, count)
        if start >= stop:
            return
        rows = torch.arange(start, stop, device=pairs.x_BD.device) % batch
        for side, embeddings_BD in enumerate((pairs.y_BD, pairs.x_BD)):
            old_nD, new_nD = self.prototypes_2mD[side, start:stop], embeddings_BD[rows].to(self.prototypes_2mD.dtype)
            # Features of norm 0 have an embedding of norm 0, which has no direction and leaves the prototype as it is.
            old_nD.copy_(torch.where(new_nD.norm(dim=1, keepdim=True) > 0.5, new_nD, old_nD))
        self.squares_2mD[:, start:stop] = 0

    def __call__(self, lse_b2: Tensor, pos_b2: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        self.pairs, batch = pairs, pairs.batch
        self._restart(pairs)
        log_b2 = torch.logaddexp(lse_b2 - pos_b2 - math.log(batch - 1), self.log_eps)
        for _ in range(self.options.updates):
            self._update(log_b2, pos_b2, batch)
        predicted_b2 = self._predict(pos_b2)
        self.error_b2 = (log_b2 - predicted_b2).abs()
        self.a_b2 = predicted_b2.maximum(log_b2 - self.options.clip)
        return pos_b2 + math.log(batch - 1) + self.a_b2, (log_b2 - self.a_b2).exp() + self.a_b2 - 1

    def _predict(self, pos_b2: Tensor) -> Tensor:
        """Returns a_i of this rank's images and texts, [b, 2]."""
        a_b2 = torch.empty_like(pos_b2)
        for side in (0, 1):
            unit_mD = torch.nn.functional.normalize(self.prototypes_2mD[side], dim=1)
            for part in self._parts(len(pos_b2)):
                a_b2[part, side] = self._scores(side, part, unit_mD, pos_b2)[1]
        return a_b2

    def _scores(self, side: int, part: slice, unit_mD: Tensor, pos_b2: Tensor) -> tuple[Tensor, Tensor]:
        """Returns α cos(x_i, P_j) - pos_i - log m, [t, m], and a_i, [t], of samples of this rank."""
        z_tm = self._own(side)[part] @ unit_mD.T
        z_tm.mul_(self.alpha).sub_(pos_b2[part, side, None] + math.log(len(unit_mD)))
        return z_tm, torch.logaddexp(z_tm.logsumexp(1), self.log_eps)

    def _update(self, log_b2: Tensor, pos_b2: Tensor, batch: int) -> None:
        """Makes one step of AdaGrad on τ ½mean Φ over the global batch. Collective."""
        grad_2mD = torch.zeros_like(self.prototypes_2mD)
        norm_2m1 = self.prototypes_2mD.norm(dim=2, keepdim=True)
        unit_2mD = self.prototypes_2mD / norm_2m1
        for side in (0, 1):
            for part in self._parts(len(pos_b2)):
                z_tm, a_t = self._scores(side, part, unit_2mD[side], pos_b2)
                slope_t = 1 - (log_b2[part, side] - a_t).clamp(max=self.options.clip).exp()  # dΦ/da
                z_tm.sub_(a_t[:, None]).exp_().mul_(slope_t[:, None])
                grad_2mD[side].addmm_(z_tm.T, self._own(side)[part])
        grad_2mD = self.comm.sum(grad_2mD.div_(2 * batch))  # τ·α = 1
        grad_2mD -= unit_2mD * (unit_2mD * grad_2mD).sum(2, keepdim=True)
        grad_2mD /= norm_2m1
        self.squares_2mD.addcmul_(grad_2mD, grad_2mD)
        self.prototypes_2mD.addcdiv_(
            grad_2mD, self.squares_2mD.sqrt().add_(_ADAGRAD_EPS), value=-self.options.prototype_lr
        )

    def _own(self, side: int) -> Tensor:
        return self.pairs.y_bD if side else self.pairs.x_bD

    def _parts(self, b: int) -> list[slice]:
        return [slice(at, min(at + self.pairs.tiling.size, b)) for at in range(0, b, self.pairs.tiling.size)]
