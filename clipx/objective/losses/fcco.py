"""Objectives whose normaliser is a moving average over a sample's own past (FCCO, arXiv:2407.01445 and 2202.12387).

With g_i = 1/(B-1) Σ_{j≠i} exp(z_ij - pos_i), which one batch estimates, u_i ← (1-γ) u_i + γ g_i, and ε + u_i stands in
for g_i's expectation over the data set: the loss is of log(ε + u), the gradient that of log(ε + g) with ε + u below.
All in logarithms: at τ = 0.01, u spans e^±200.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.objective.base import Metrics, StepInputs
from clipx.objective.losses.contrastive import TiledObjective, contrastive_loss, individual_loss
from clipx.objective.losses.sample_state import SampleTable, repeated_later
from clipx.objective.losses.temperature import SampleTemperature, Temperature

Gamma = Callable[[int], float]
"""Samples seen before a step -> γ of that step."""

Combine = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(½mean log(ε+u), α, ½mean log u) -> the loss; all 0-dim, α with this rank's share of the gradient."""


class MovingAverage:
    """The normaliser of one step, from log u of this rank's samples before it [b, 2]; NaN where never seen."""

    def __init__(self, log_u_b2: Tensor, gamma: float, eps: float) -> None:
        self.log_u_b2, self.gamma = log_u_b2, gamma
        self.log_eps = log_u_b2.new_tensor(_log(eps))

    def __call__(self, lse_b2: Tensor, pos_b2: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        log_g_b2 = lse_b2 - pos_b2 - math.log(batch - 1)
        moved_b2 = torch.logaddexp(self.log_u_b2 + _log(1 - self.gamma), log_g_b2 + math.log(self.gamma))
        self.log_u_b2 = torch.where(self.log_u_b2.isnan(), log_g_b2, moved_b2)
        loss_b2 = self.loss(self.log_u_b2)
        return pos_b2 + math.log(batch - 1) + loss_b2, loss_b2

    def loss(self, log_u: Tensor) -> Tensor:
        """log(ε + u)."""
        return torch.logaddexp(log_u, self.log_eps)


class FCCO(TiledObjective):
    """What all of them share: the table of per-sample state, γ, and when state is committed."""

    def __init__(self, comm: Comm, table: SampleTable, gamma: Gamma, eps: float, tile: int) -> None:
        super().__init__(comm, tile)
        self.table, self.schedule, self.eps = table, gamma, eps
        self.gamma = gamma(0)
        self._pending: tuple[Tensor, Tensor] | None = None  # the batch's numbers and new rows, until the step is made

    def before_step(self, samples_seen: int) -> None:
        self.gamma = self.schedule(samples_seen)

    def after_step(self, samples_seen: int) -> None:
        if self._pending is not None:
            self.table.write(*self._pending)
            self._pending = None

    def _metrics(self, index_B: Tensor, log_u_B2: Tensor, average: MovingAverage, temperature: Tensor) -> Metrics:
        """Of the global batch. `repeated`: samples that come again later in it, whose rows the later ones overwrite."""
        return {
            "temperature": temperature,
            "log_u": average.loss(log_u_B2).mean(),
            "gamma": log_u_B2.new_tensor(self.gamma),
            "repeated": repeated_later(index_B).sum(),
        }


class GlobalFCCO(FCCO):
    """One temperature for all pairs. `combine` makes the loss; κ multiplies its gradient through the pairs' own α."""

    def __init__(
        self,
        comm: Comm,
        table: SampleTable,
        gamma: Gamma,
        eps: float,
        tile: int,
        temperature: Temperature,
        combine: Combine,
        kappa: float = 1.0,
    ) -> None:
        super().__init__(comm, table, gamma, eps, tile)
        self.temperature, self.combine, self.kappa = temperature, combine, kappa

    def before_step(self, samples_seen: int) -> None:
        FCCO.before_step(self, samples_seen)
        self.temperature.before_step()

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        index_B = self.table.numbers(inputs.index)
        average = MovingAverage(self.table.take(index_B), self.gamma, self.eps)
        alpha = self.temperature()
        inner = scale_gradient(alpha, self.kappa)
        contrast = contrastive_loss(inputs.image, inputs.text, inner, average, self.comm, self.tiling)
        log_u_B2 = self.comm.gather(average.log_u_b2)
        self._pending = index_B, log_u_B2
        loss = self.combine(contrast, scale_gradient(alpha, 1 / self.comm.world), log_u_B2.mean())
        return loss, self._metrics(index_B, log_u_B2, average, 1 / alpha.detach())

    def after_step(self, samples_seen: int) -> None:
        FCCO.after_step(self, samples_seen)
        self.temperature.after_step()


def contrast_alone(contrast: Tensor, alpha: Tensor, log_u: Tensor) -> Tensor:
    """½mean log(ε+u): FastCLIP v0."""
    return contrast


def times_tau(contrast: Tensor, alpha: Tensor, log_u: Tensor) -> Tensor:
    """The global contrastive loss, τ ½mean log(ε+u): SogCLR, FastCLIP v1."""
    return contrast / alpha


def robust(rho: float) -> Combine:
    """The robust global contrastive loss at one temperature, τ (½mean log(ε+u) + ρ): FastCLIP v3."""
    return lambda contrast, alpha, log_u: (contrast + rho) / alpha


def robust_official(rho: float) -> Combine:
    """As `robust`; the gradient through the factor τ is of log u, without ε, as FastCLIP's code has it."""

    def combine(contrast: Tensor, alpha: Tensor, log_u: Tensor) -> Tensor:
        factor = (log_u + rho) / alpha
        return contrast / alpha.detach() + rho / alpha.detach() + factor - factor.detach()

    return combine


class IndividualFCCO(FCCO):
    """A temperature for each sample and side, learned beside its u: the robust global contrastive loss,
    ½mean over both sides of τ_i (log(ε+u_i) + ρ) (iSogCLR, arXiv:2305.11965; FastCLIP v2)."""

    def __init__(
        self,
        comm: Comm,
        table: SampleTable,
        gamma: Gamma,
        eps: float,
        tile: int,
        temperature: SampleTemperature,
        rho: float,
        weighted: bool,
    ) -> None:
        """`weighted`: the embeddings' gradient carries the factor τ_i that the loss has."""
        super().__init__(comm, table, gamma, eps, tile)
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

        def normaliser(lse_b2: Tensor, pos_b2: Tensor, batch: int) -> tuple[Tensor, Tensor]:
            a_b2, log_b2 = average(lse_b2, pos_b2, batch)
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
    """x, whose gradient is multiplied."""
    return x.detach() + (x - x.detach()) * factor


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
