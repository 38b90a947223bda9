"""Objectives with a moving average of each sample's normaliser (FCCO, arXiv:2407.01445 and 2202.12387).

One batch estimates g_i = 1/(B-1) Σ_{j≠i} exp(z_ij - pos_i). The moving average u_i ← (1-γ) u_i + γ g_i estimates the
expectation of g_i over the data set: the loss is that of log(ε + u), the gradient that of log(ε + g) with ε + u in the
denominator. All values are stored as logarithms: at τ = 0.01, u ranges from e^-200 to e^200.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.objective.base import Metrics, StepInputs
from clipx.objective.losses.contrastive import Pairs, TiledObjective, Tiling, contrastive_loss, individual_loss
from clipx.objective.losses.sample_state import SampleTable, repeated_later
from clipx.objective.losses.temperature import SampleTemperature, Temperature

Gamma = Callable[[int], float]
"""Samples seen before a step -> γ of the step."""

Combine = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(½mean log(ε+u), α, ½mean log u) -> the loss; all 0-dim, α with this rank's share of the gradient."""


class MovingAverage:
    """The normaliser of one step, from log u of this rank's samples before the step, [b, 2]; NaN for unseen samples."""

    def __init__(self, log_u_b2: Tensor, gamma: float, eps: float) -> None:
        self.log_u_b2, self.gamma = log_u_b2, gamma
        self.log_eps = log_u_b2.new_full((), _log(eps))  # not new_tensor, which waits for the device

    def __call__(self, lse_b2: Tensor, pos_b2: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        log_g_b2 = lse_b2 - pos_b2 - math.log(pairs.batch - 1)
        moved_b2 = torch.logaddexp(self.log_u_b2 + _log(1 - self.gamma), log_g_b2 + math.log(self.gamma))
        self.log_u_b2 = torch.where(self.log_u_b2.isnan(), log_g_b2, moved_b2)
        loss_b2 = self.loss(self.log_u_b2)
        return pos_b2 + math.log(pairs.batch - 1) + loss_b2, loss_b2

    def loss(self, log_u: Tensor) -> Tensor:
        """Returns log(ε + u)."""
        return torch.logaddexp(log_u, self.log_eps)


class FCCO(TiledObjective):
    """Base class of the FCCO objectives: the table of per-sample state, γ, and the commit of state after a step."""

    def __init__(self, comm: Comm, table: SampleTable, gamma: Gamma, eps: float, tiling: Tiling) -> None:
        super().__init__(comm, tiling)
        self.table, self.schedule, self.eps = table, gamma, eps
        self.gamma = gamma(0)
        self._pending: tuple[Tensor, Tensor] | None = None  # indices and new rows of the batch, until after_step

    def before_step(self, samples_seen: int) -> None:
        self.gamma = self.schedule(samples_seen)

    def after_step(self, samples_seen: int, found_inf: Tensor | None = None) -> None:
        if self._pending is not None:
            self.table.write(*self._pending, found_inf)
            self._pending = None

    def _metrics(self, index_B: Tensor, log_u_B2: Tensor, average: MovingAverage, temperature: Tensor) -> Metrics:
        """Returns metrics of the global batch. `repeated`: samples that occur again later in the batch, whose rows the
        later occurrence overwrites."""
        return {
            "temperature": temperature,
            "log_u": average.loss(log_u_B2).mean(),
            "gamma": log_u_B2.new_full((), self.gamma),
            "repeated": repeated_later(index_B).sum(),
        }


class GlobalFCCO(FCCO):
    """FCCO with one temperature for all pairs.

    `combine` computes the loss. κ (`kappa`) multiplies its gradient with respect to α through the pairs.
    """

    def __init__(
        self,
        comm: Comm,
        table: SampleTable,
        gamma: Gamma,
        eps: float,
        tiling: Tiling,
        temperature: Temperature,
        combine: Combine,
        kappa: float = 1.0,
    ) -> None:
        super().__init__(comm, table, gamma, eps, tiling)
        self.temperature, self.combine, self.kappa = temperature, combine, kappa

    def before_step(self, samples_seen: int) -> None:
        FCCO.before_step(self, samples_seen)
        self.temperature.before_step()

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        index_B = self.table.numbers(inputs.index)
        average = MovingAverage(self.table.take(index_B), self.gamma, self.eps)
        alpha = self.temperature()
        kappa, combine = self._rule(len(index_B))
        inner = scale_gradient(alpha, kappa)
        contrast = contrastive_loss(inputs.image, inputs.text, inner, average, self.comm, self.tiling)
        log_u_B2 = self.comm.gather(average.log_u_b2)
        self._pending = index_B, log_u_B2
        loss = combine(contrast, scale_gradient(alpha, 1 / self.comm.world), log_u_B2.mean())
        return loss, self._metrics(index_B, log_u_B2, average, 1 / alpha.detach())

    def _rule(self, batch: int) -> tuple[float, Combine]:
        """Returns κ and the function that computes the loss of a global batch of this size."""
        return self.kappa, self.combine

    def after_step(self, samples_seen: int, found_inf: Tensor | None = None) -> None:
        FCCO.after_step(self, samples_seen, found_inf)
        self.temperature.after_step()


class DRRhoCLIP(GlobalFCCO):
    """Robust global contrastive loss on pair losses minus those of a reference model (arXiv:2505.06699).

    The loss of a pair is the difference of similarities s_ij - s_ii; that of the reference is r_ij - r_ii, with r the
    similarities of its embeddings. Their difference is that of the similarities s - r, which are the products of
    concatenated embeddings:

        s_ij - r_ij = [x_i, -p_i]·[y_j, q_j]        x, y of the model, p, q of the reference

    so that the kernel of `contrastive` computes loss and gradients; the gradient of the reference's columns is not
    used. Targets: the reference's image_bT and text_bT.
    """

    official_rho: float | None = None
    """ρ with the published gradient of α, whose mean over negatives divides by B. None: the exact gradient."""

    def _rule(self, batch: int) -> tuple[float, Combine]:
        if self.official_rho is None:
            return GlobalFCCO._rule(self, batch)
        share = 1 - 1 / batch
        return 2 / share, robust_scaled(self.official_rho, share)

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        reference_image_bT, reference_text_bT = inputs.targets
        image = _joined(inputs.image, -reference_image_bT)
        return GlobalFCCO.forward(self, replace(inputs, image=image, text=_joined(inputs.text, reference_text_bT)))


def _joined(own_bD: Tensor, reference_bT: Tensor) -> Tensor:
    """Returns both embeddings side by side, in float32 or the wider format of the model's; no gradient of the
    reference."""
    dtype = torch.promote_types(own_bD.dtype, torch.float32)
    return torch.cat([own_bD.to(dtype), reference_bT.detach().to(dtype)], 1)


def contrast_alone(contrast: Tensor, alpha: Tensor, log_u: Tensor) -> Tensor:
    """Returns ½mean log(ε+u): FastCLIP v0, and the published recipes of SogCLR and FastCLIP v1."""
    return contrast


def times_tau(contrast: Tensor, alpha: Tensor, log_u: Tensor) -> Tensor:
    """Returns the global contrastive loss, τ ½mean log(ε+u): SogCLR, FastCLIP v1."""
    return contrast / alpha


def robust(rho: float) -> Combine:
    """Robust global contrastive loss at one temperature, τ (½mean log(ε+u) + ρ): FastCLIP v3."""
    return lambda contrast, alpha, log_u: (contrast + rho) / alpha


def robust_official(rho: float) -> Combine:
    """`robust` with FastCLIP's published gradient: that through the factor τ is of log u, without ε."""

    def combine(contrast: Tensor, alpha: Tensor, log_u: Tensor) -> Tensor:
        factor = (log_u + rho) / alpha
        return contrast / alpha.detach() + rho / alpha.detach() + factor - factor.detach()

    return combine


def robust_scaled(rho: float, share: float) -> Combine:
    """`robust` with DRRho-CLIP's published gradient: that through the factor τ is of log(`share`·(ε+u))."""

    def combine(contrast: Tensor, alpha: Tensor, log_u: Tensor) -> Tensor:
        scaled = math.log(share) / alpha
        return robust(rho)(contrast, alpha, log_u) + scaled - scaled.detach()

    return combine


class IndividualFCCO(FCCO):
    """FCCO with a learned temperature for each sample and side, stored next to its u: the robust global contrastive
    loss, ½mean over both sides of τ_i (log(ε+u_i) + ρ) (iSogCLR, arXiv:2305.11965; FastCLIP v2)."""

    def __init__(
        self,
        comm: Comm,
        table: SampleTable,
        gamma: Gamma,
        eps: float,
        tiling: Tiling,
        temperature: SampleTemperature,
        rho: float,
        weighted: bool,
    ) -> None:
        """Creates the objective. `weighted`: the gradient of the embeddings includes the factor τ_i of the loss."""
        super().__init__(comm, table, gamma, eps, tiling)
        self.temperature, self.rho, self.weighted = temperature, rho, weighted
        self.epoch = 0

    def before_step(self, samples_seen: int) -> None:
        FCCO.before_step(self, samples_seen)
        self.epoch = samples_seen // self.table.samples

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        index_B = self.table.numbers(inputs.index)
        rows_b8 = self.table.take(index_B)
        average = MovingAverage(rows_b8[:, :2], self.gamma, self.eps)
        tau_b2 = self.temperature.tau(rows_b8[:, 2:])

        def normaliser(lse_b2: Tensor, pos_b2: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
            a_b2, log_b2 = average(lse_b2, pos_b2, pairs)
            return a_b2, tau_b2 * (log_b2 + self.rho)

        weight_b2 = tau_b2 if self.weighted else torch.ones_like(tau_b2)
        loss, tilt_b2 = individual_loss(
            inputs.image, inputs.text, 1 / tau_b2, weight_b2, normaliser, self.comm, self.tiling
        )
        grad_b2 = average.loss(average.log_u_b2) + self.rho - tilt_b2
        moved_b6 = self.temperature.step(rows_b8[:, 2:], grad_b2, self.epoch)
        rows_B10 = self.comm.gather(torch.cat([average.log_u_b2, moved_b6, tau_b2], 1))
        self._pending = index_B, rows_B10[:, :8]
        return loss, self._metrics(index_B, rows_B10[:, :2], average, rows_B10[:, 8:].mean())


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Returns x; multiplies its gradient by `factor`."""
    return x.detach() + (x - x.detach()) * factor


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
