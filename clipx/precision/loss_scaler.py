"""Loss scaling for float16, whose gradients would underflow without it (arXiv:1710.03740): torch.amp.GradScaler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clipx.config.lazy_torch import torch


@dataclass(frozen=True, slots=True)
class LossScaling:
    """Settings of torch.amp.GradScaler: the first scale, and the steps without an overflow until it doubles."""

    initial: float
    growth_steps: int


def build_scaler(scaling: LossScaling | None, device_type: str) -> torch.amp.GradScaler:
    """Returns a scaler that halves the scale at each overflow. Without `scaling` it is disabled, and scales nothing."""
    if scaling is None:
        return torch.amp.GradScaler(device_type, enabled=False)
    return torch.amp.GradScaler(device_type, init_scale=scaling.initial, growth_interval=scaling.growth_steps)


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, float]:
    """Returns the scale and the steps since it changed, for a checkpoint; empty if disabled. Waits for the device."""
    state = scaler.state_dict()
    return {"scale": state["scale"], "steps": state["_growth_tracker"]} if state else {}


def restore_scaler(scaler: torch.amp.GradScaler, state: Mapping[str, float]) -> None:
    """Restores the result of `scaler_state`. If it is empty, from a run without scaling, the initial scale stays."""
    if scaler.is_enabled() and state:
        now = scaler.state_dict()
        scaler.load_state_dict({**now, "scale": state["scale"], "_growth_tracker": int(state["steps"])})
