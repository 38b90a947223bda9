"""Temperatures, as the inverse α = 1/τ that multiplies the similarities."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class GlobalTemperature(nn.Module):
    """One learned log α (arXiv:2103.00020). 0-dim; kept in [0, log max_scale] by `clamp`."""

    def __init__(self, init: float, max_scale: float) -> None:
        """`init` is τ, e.g. 0.07; `max_scale` the largest α, e.g. 100."""
        super().__init__()
        self.max_log_scale = math.log(max_scale)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(init)))

    def forward(self) -> Tensor:
        """α, 0-dim."""
        return self.log_scale.exp()

    @torch.no_grad()
    def clamp(self) -> None:
        self.log_scale.clamp_(0, self.max_log_scale)
