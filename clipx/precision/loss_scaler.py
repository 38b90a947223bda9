"""Loss scaling for float16, whose gradients would underflow without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clipx.config.lazy_torch import torch
from clipx.errors import require


@dataclass(frozen=True, slots=True)
class LossScaling:
    """Settings of torch.amp.GradScaler: the first scale, and the steps without an overflow until it doubles."""

    initial: float
    growth_steps: int

    def __post_init__(self) -> None:
        require(self.initial >= 1, f"precision.loss_scale={self.initial:g} must be at least 1: 65536 is usual")
        require(
            self.growth_steps >= 1,
            f"precision.loss_scale_growth={self.growth_steps} must be at least 1 step: 2000 is usual",
        )


class LossScale:
    """Scales the loss so that float16 gradients do not underflow, and unscales the gradients (arXiv:1710.03740).

    As in torch.amp.GradScaler, the scale doubles after `growth_steps` steps without an overflow, and each overflow
    halves it. `skipped` counts the steps that overflowed. Does nothing if `scaling` is None.
    """

    def __init__(self, scaling: LossScaling | None, device_type: str) -> None:
        self.on = scaling is not None
        scaling = scaling or LossScaling(65536.0, 2000)
        self._scaler = torch.amp.GradScaler(
            device_type, init_scale=scaling.initial, growth_interval=scaling.growth_steps, enabled=self.on
        )
        self.skipped = 0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss times the scale."""
        out: torch.Tensor = self._scaler.scale(loss)
        return out

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale. Call it once per backward pass, then `step` or `reduce`."""
        self._scaler.unscale_(optimizer)

    def step(
        self, step: Callable[[torch.Tensor], None], optimizer: torch.optim.Optimizer, found_inf: torch.Tensor
    ) -> None:
        """Steps the optimizer by `step(found_inf)`. With scaling, the host reads `found_inf` and updates the scale."""
        if not self.on:
            step(found_inf)
        elif found_inf.item():
            self.discard()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()

    def discard(self) -> None:
        """Forgets the unscaled gradients of a step that is not made. The scale does not change."""
        if self.on:
            self._scaler.update(self._scaler.get_scale())

    def retries(self, loss: torch.Tensor, norm: torch.Tensor) -> bool:
        """Returns whether to compute the batch again with a smaller scale. Only with scaling does the host read."""
        return self.on and math.isfinite(loss.item()) and not math.isfinite(norm.item()) and self.reduce()

    def reduce(self) -> bool:
        """Halves the scale after non-finite gradients.

        Returns False if the scale is not the cause: scaling is off, the scale was already 1 or less, or it did not
        shrink.
        """
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
        """Returns the state for a checkpoint. Synchronizes with the device."""
        if not self.on:
            return {}
        state = self._scaler.state_dict()
        return {"scale": state["scale"], "steps": state["_growth_tracker"], "skipped": self.skipped}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restores the result of `state`. If it is empty, from a run without scaling, the initial scale stays."""
        if self.on and state:
            current = self._scaler.state_dict()
            self._scaler.load_state_dict({**current, "scale": state["scale"], "_growth_tracker": int(state["steps"])})
            self.skipped = int(state["skipped"])
