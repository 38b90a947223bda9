"""The scale of the loss under float16, whose gradients would vanish without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clipx.config.lazy_torch import torch
from clipx.errors import require


@dataclass(frozen=True, slots=True)
class LossScaling:
    """torch.amp.GradScaler's own numbers."""

    initial: float
    growth_steps: int

    def __post_init__(self) -> None:
        require(self.initial >= 1, f"precision.loss_scale={self.initial:g} must be at least 1: 65536 is usual")
        require(
            self.growth_steps >= 1,
            f"precision.loss_scale_growth={self.growth_steps} must be at least 1 step: 2000 is usual",
        )


class LossScale:
    """Multiplies the loss, so that gradients do not vanish in float16, and divides them again (arXiv:1710.03740).

    torch.amp.GradScaler's rule: doubled after so many steps without an overflow, halved by each. `skipped` counts the
    steps that overflowed. Without `scaling` it does nothing.
    """

    def __init__(self, scaling: LossScaling | None, device_type: str) -> None:
        self.on = scaling is not None
        scaling = scaling or LossScaling(65536.0, 2000)
        self._scaler = torch.amp.GradScaler(
            device_type, init_scale=scaling.initial, growth_interval=scaling.growth_steps, enabled=self.on
        )
        self.skipped = 0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._scaler.scale(loss)
        return out

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Once for each backward pass; then `step` or `reduce`."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's, on gradients that are finite."""
        self._scaler.step(optimizer)
        self._scaler.update()

    def reduce(self) -> bool:
        """Halves the scale after gradients that are not finite. False where the scale was not to blame: at 1 or less
        there is nothing left to take away."""
        if not self.on:
            return False
        before = self._scaler.get_scale()
        self._scaler.update()
        if before <= 1 or self._scaler.get_scale() >= before:
            return False
        self.skipped += 1
        return True

    def metrics(self) -> dict[str, float]:
        return {"train/loss_scale": self._scaler.get_scale(), "train/skipped_steps": self.skipped} if self.on else {}

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps. Waits for the device."""
        if not self.on:
            return {}
        state = self._scaler.state_dict()
        return {"scale": state["scale"], "steps": state["_growth_tracker"], "skipped": self.skipped}

    def restore(self, state: Mapping[str, float]) -> None:
        """The inverse. A run that had no scale before begins with its own."""
        if self.on and state:
            own = self._scaler.state_dict()
            self._scaler.load_state_dict({**own, "scale": state["scale"], "_growth_tracker": int(state["steps"])})
            self.skipped = int(state["skipped"])
