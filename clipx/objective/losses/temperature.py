"""Temperatures τ, represented by the inverse α = 1/τ that multiplies the similarities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

SLOW_BELOW = 0.03
"""Largest τ at which FastCLIP v3 takes a third of its step (arXiv:2407.01445, section 5)."""


class Temperature(nn.Module):
    """One α for all pairs. The objective calls `before_step` and `after_step` from its methods of the same name."""

    def forward(self) -> Tensor:
        """Returns α, 0-dim."""
        raise NotImplementedError

    def before_step(self) -> None:
        pass

    def after_step(self) -> None:
        pass


class ConstantTemperature(Temperature):
    """A constant α."""

    def __init__(self, value: float) -> None:
        """Stores α = 1 / `value`. `value` is τ, e.g. 0.07."""
        super().__init__()
        self.scale: Tensor
        # Not persistent: a resumed run uses the temperature of its configuration.
        self.register_buffer("scale", torch.tensor(1 / value), persistent=False)

    def forward(self) -> Tensor:
        return self.scale


class GlobalTemperature(Temperature):
    """One learned log α (arXiv:2103.00020), 0-dim, clamped to [0, log max_scale] after each step.

    `slow`: while τ ≤ 0.03, takes only a third of the optimizer's step. That is equivalent to a third of the learning
    rate with every optimizer here, and does not read the value on the host.
    """

    def __init__(self, init: float, max_scale: float, slow: bool = False) -> None:
        """Creates log α. `init` is τ, e.g. 0.07; `max_scale` is the largest α, e.g. 100."""
        super().__init__()
        self.max_log_scale = math.log(max_scale)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(init)))
        self.slow = slow
        self.before: Tensor | None = None

    def forward(self) -> Tensor:
        return self.log_scale.exp()

    def at_limit(self) -> Tensor:
        """Returns whether log α is at either end of its range, where steps are clamped; 0-dim."""
        return (self.log_scale <= 0) | (self.log_scale >= self.max_log_scale)

    def before_step(self) -> None:
        self.before = self.log_scale.detach().clone()

    @torch.no_grad()
    def adopt_scale(self, log_scale: float) -> str:
        """Starts from the log α of weights, clamped to the range. Returns a line for the log."""
        clamped = min(max(log_scale, 0.0), self.max_log_scale)
        self.log_scale.fill_(clamped)
        line = f"initial temperature {math.exp(-clamped):.4g}"
        if abs(clamped - log_scale) < 1e-4:  # ln 100 in 32 bits, or rounded
            return f"{line}, from the weights"
        return f"{line}: the temperature {math.exp(-log_scale):.4g} of the weights is out of range"

    @torch.no_grad()
    def after_step(self) -> None:
        if self.slow and self.before is not None:
            share = torch.where(self.before >= -math.log(SLOW_BELOW), 1 / 3, 1.0)
            self.log_scale.copy_(torch.lerp(self.before, self.log_scale, share))
        self.log_scale.clamp_(0, self.max_log_scale)


class SampleTemperature:
    """One τ per sample and side, updated by a separate Adam (arXiv:2305.11965, as implemented in FastCLIP's code).

    The state is six columns of the sample table: τ, first and second moment, each for image and text; NaN until the
    sample is seen. The moments start in epoch 0 (where β = 0), so the bias correction counts epochs.
    """

    columns = 6
    max_gradient = 5.0

    def __init__(self, init: float, minimum: float, lr: float, betas: Sequence[float], eps: float) -> None:
        """Stores the settings of Adam. `init` and `minimum` are τ."""
        self.init, self.minimum, self.lr, self.betas, self.eps = init, minimum, lr, betas, eps

    def tau(self, state_b6: Tensor) -> Tensor:
        """Returns τ, [b, 2]."""
        return torch.where(state_b6[:, :2].isnan(), self.init, state_b6[:, :2])

    @torch.no_grad()
    def step(self, state_b6: Tensor, grad_b2: Tensor, epoch: int) -> Tensor:
        """Returns the state after a step, [b, 6]. `grad_b2`: gradient with respect to τ of each sample's loss, not
        divided by the number of samples."""
        grad_b2 = grad_b2.clamp(-self.max_gradient, self.max_gradient)
        first_b2, second_b2 = state_b6[:, 2:].nan_to_num(0.0).split(2, 1)
        beta1, beta2 = self.betas if epoch > 0 else (0.0, 0.0)
        first_b2 = beta1 * first_b2 + (1 - beta1) * grad_b2
        second_b2 = beta2 * second_b2 + (1 - beta2) * grad_b2**2
        root_b2 = (second_b2 / (1 - beta2 ** (epoch + 1))).sqrt()
        step_b2 = first_b2 / (1 - beta1 ** (epoch + 1)) / (root_b2 + self.eps)
        tau_b2 = (self.tau(state_b6) - self.lr * step_b2).clamp(self.minimum, 1.0)
        return torch.cat([tau_b2, first_b2, second_b2], 1)
