"""Temperatures, as the inverse α = 1/τ that multiplies the similarities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

SLOW_BELOW = 0.03
"""τ under which FastCLIP v3 takes a third of its step (arXiv:2407.01445, section 5)."""


class Temperature(nn.Module):
    """One α for all pairs. `before_step` and `after_step` are called as the objective's own are."""

    def forward(self) -> Tensor:
        """α, 0-dim."""
        raise NotImplementedError

    def before_step(self) -> None:
        pass

    def after_step(self) -> None:
        pass


class ConstantTemperature(Temperature):
    def __init__(self, value: float) -> None:
        """`value` is τ, e.g. 0.07."""
        super().__init__()
        self.scale: Tensor
        # Of the configuration, not of the state: a resumed run takes what its configuration says.
        self.register_buffer("scale", torch.tensor(1 / value), persistent=False)

    def forward(self) -> Tensor:
        return self.scale


class GlobalTemperature(Temperature):
    """One learned log α (arXiv:2103.00020). 0-dim; kept in [0, log max_scale] after each step.

    `slow`: while τ ≤ 0.03 only a third of the optimizer's step is taken, which is what a third of the learning rate
    does under every optimizer here, and needs no look at the value from the host.
    """

    def __init__(self, init: float, max_scale: float, slow: bool = False) -> None:
        """`init` is τ, e.g. 0.07; `max_scale` the largest α, e.g. 100."""
        super().__init__()
        self.max_log_scale = math.log(max_scale)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(init)))
        self.slow = slow
        self.before: Tensor | None = None

    def forward(self) -> Tensor:
        return self.log_scale.exp()

    def at_limit(self) -> Tensor:
        """Whether it lies at either end of its range, where the optimizer's steps are cut off; 0-dim."""
        return (self.log_scale <= 0) | (self.log_scale >= self.max_log_scale)

    def before_step(self) -> None:
        self.before = self.log_scale.detach().clone()

    @torch.no_grad()
    def adopt_scale(self, log_scale: float) -> str:
        """Goes on from the log α that weights were trained with, in its own range. Returns what the log should say."""
        kept = min(max(log_scale, 0.0), self.max_log_scale)
        self.log_scale.fill_(kept)
        told = f"the temperature begins at {math.exp(-kept):.4g}"
        if abs(kept - log_scale) < 1e-4:  # ln 100 in 32 bits, or rounded
            return f"{told}, as the weights have it"
        return f"{told}: the weights' {math.exp(-log_scale):.4g} is out of its range"

    @torch.no_grad()
    def after_step(self) -> None:
        if self.slow and self.before is not None:
            share = torch.where(self.before >= -math.log(SLOW_BELOW), 1 / 3, 1.0)
            self.log_scale.copy_(torch.lerp(self.before, self.log_scale, share))
        self.log_scale.clamp_(0, self.max_log_scale)


class SampleTemperature:
    """A τ for each sample and side, moved by an Adam of its own (arXiv:2305.11965, as FastCLIP's code has it).

    Its state is six columns of the sample table: τ, first and second moment, each for image and text; NaN until the
    sample is seen. The moments start in epoch 0 (β = 0 there), so the bias correction counts epochs.
    """

    columns = 6
    max_gradient = 5.0

    def __init__(
        self, init: float, minimum: float, lr: float, betas: Sequence[float], eps: float, rooted: bool = True
    ) -> None:
        """`rooted`: the step is divided by the root of the second moment (Adam), not by the moment itself, which is
        what the published code does."""
        self.init, self.minimum, self.lr, self.betas, self.eps, self.rooted = init, minimum, lr, betas, eps, rooted

    def tau(self, state_b6: Tensor) -> Tensor:
        """τ [b, 2]."""
        return torch.where(state_b6[:, :2].isnan(), self.init, state_b6[:, :2])

    @torch.no_grad()
    def step(self, state_b6: Tensor, grad_b2: Tensor, epoch: int) -> Tensor:
        """The state after a step along a gradient with respect to τ, per sample and not divided by their number."""
        grad_b2 = grad_b2.clamp(-self.max_gradient, self.max_gradient)
        first_b2, second_b2 = state_b6[:, 2:].nan_to_num(0.0).split(2, 1)
        beta1, beta2 = self.betas if epoch > 0 else (0.0, 0.0)
        first_b2 = beta1 * first_b2 + (1 - beta1) * grad_b2
        second_b2 = beta2 * second_b2 + (1 - beta2) * grad_b2**2
        scale_b2 = second_b2 / (1 - beta2 ** (epoch + 1))
        step_b2 = first_b2 / (1 - beta1 ** (epoch + 1)) / ((scale_b2.sqrt() if self.rooted else scale_b2) + self.eps)
        tau_b2 = (self.tau(state_b6) - self.lr * step_b2).clamp(self.minimum, 1.0)
        return torch.cat([tau_b2, first_b2, second_b2], 1)
