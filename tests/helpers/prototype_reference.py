"""Reference definition of the normaliser predicted by prototypes (NeuCLIP): double loops, one float64 scalar at a time.

It shares no formula with clipx beyond the definitions; gradients of embeddings, temperature and prototypes come from
autograd. Notation of `objective_reference`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.objective_reference import SIDES, Pairs, inner, mean, similarities


@dataclass
class Step:
    loss: Tensor
    log_normaliser: float
    error: float


@dataclass
class Prototypes:
    """State and settings: `rows[side]` are the prototypes that samples of a side are compared with, [m, D], and
    `squares[side]` the sums of their squared gradients."""

    rows: list[Tensor]
    squares: list[Tensor]
    eps: float
    rho: float
    clip: float
    updates: int
    lr: float
    restart: int

    def step(self, x: Tensor, y: Tensor, log_scale: Tensor, seen: int) -> Step:
        """Updates the prototypes and returns the loss with the gradient of the embeddings and of the temperature."""
        self._restart(x.detach(), y.detach(), seen)
        s, tau = similarities(x, y), (-log_scale).exp()
        constant, fixed_tau = [[v.detach() for v in row] for row in s], tau.detach()
        for _ in range(self.updates):
            self._update(x.detach(), y.detach(), constant, fixed_tau)
        terms, numbers, errors = [], [], []
        for i in range(len(x)):
            for side in SIDES:
                a = self._predict((x, y)[side][i].detach(), side, constant[i][i], fixed_tau, self.rows[side]).item()
                log_g = math.log(self.eps + inner(constant, i, side, fixed_tau).item())
                errors.append(abs(log_g - a))
                a = max(a, log_g - self.clip)
                numbers.append(a)
                terms.append(math.exp(-a) * (self.eps + inner(s, i, side, tau)) + a - 1)
        return Step(tau * (mean(terms) + self.rho), sum(numbers) / len(numbers), sum(errors) / len(errors))

    def _restart(self, x: Tensor, y: Tensor, seen: int) -> None:
        """Stores the embeddings of a batch in the next places after a restart; the first batch fills all places.

        An embedding of norm 0 leaves the place as it is."""
        batch, count = len(x), len(self.rows[0])
        first = seen % self.restart // batch * batch
        for place in range(count):
            if seen == 0 or first <= place < first + batch:
                for side in SIDES:
                    if (y, x)[side][place % batch].norm() > 0.5:
                        self.rows[side][place] = (y, x)[side][place % batch]
                    self.squares[side][place] = 0

    def _predict(self, own: Tensor, side: int, positive: Tensor, tau: Tensor, rows: Tensor) -> Tensor:
        """Returns log(ε + 1/m Σ_j exp((cos(own, P_j) - positive)/τ))."""
        terms = [((torch.dot(own, p) / p.norm() - positive) / tau).exp() for p in rows]
        return (self.eps + mean(terms)).log()

    def _update(self, x: Tensor, y: Tensor, s: Pairs, tau: Tensor) -> None:
        """Makes a step of AdaGrad on τ times the mean of exp(-a)(ε + g) + a - 1.

        Where log(ε + g) - a exceeds the limit, the gradient is the one at the limit.
        """
        leaves = [rows.detach().clone().requires_grad_() for rows in self.rows]
        terms = []
        for i in range(len(x)):
            for side in SIDES:
                a = self._predict((x, y)[side][i], side, s[i][i], tau, leaves[side])
                log_g = math.log(self.eps + inner(s, i, side, tau).item())
                slope = 1 - math.exp(min(log_g - a.item(), self.clip))
                terms.append(slope * a)  # dΦ/da at a; if not limited, 1 - exp(-a)(ε + g)
        gradients = torch.autograd.grad(tau * mean(terms), leaves)
        for side in SIDES:
            self.squares[side] = self.squares[side] + gradients[side] ** 2
            self.rows[side] = self.rows[side] - self.lr * gradients[side] / (self.squares[side].sqrt() + 1e-10)
