"""An optimizer step that the device skips: the host does not read whether the gradients are finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from clipx.checkpoint.staging import local_tensor
from clipx.compat import supports_amp_scaling


class SkippableStep:
    """Steps an optimizer, except where `found_inf` is 1: then weights and state stay as they were, bit for bit.

    Optimizers with a fused kernel skip in it, as with torch.amp.GradScaler. Around other optimizers the weights and the
    state are copied and selected with torch.where: state that the step creates becomes zero, and step counts on the
    host, which the step reads, are restored by `undo`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, preserve: bool) -> None:
        """Wraps `optimizer`. `device`: of `found_inf`. `preserve`: false if the run ends or restores a checkpoint after
        a skipped step, so that an optimizer without a fused kernel need not preserve anything."""
        self.optimizer, self._preserve = optimizer, preserve
        self._fused = bool(supports_amp_scaling(optimizer, False))
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        self._weights = weights
        # FSDP's cpu_offload: the gradients are on the host already, and the copy of a flag would not be waited for.
        self._offloaded = any(p.device.type != device.type for p in weights)
        self._undo: list[tuple[dict[str, Any], str, Tensor | float]] = []  # state on the host before the step

    @torch.no_grad()
    def __call__(self, found_inf: Tensor) -> None:
        """Steps the optimizer unless `found_inf`, 0-dim float32, is 1."""
        self._undo = []
        if self._offloaded:
            if not found_inf.item():
                self.optimizer.step()
        elif self._fused:
            self._step_fused(found_inf)
        elif self._preserve:
            self._step_and_select(found_inf.bool())
        else:
            self.optimizer.step()

    def undo(self) -> None:
        """Restores the state on the host after a skipped step. Call it before the next step."""
        for state, key, before in self._undo:
            state[key] = before
        self._undo = []

    def _step_fused(self, found_inf: Tensor) -> None:
        new = not self.optimizer.state
        self.optimizer.grad_scale, self.optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
        self.optimizer.step()
        del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        if new:  # torch's fused SGD leaves the momentum of a skipped first step uninitialized
            for state, key in self._slots():
                _select(found_inf.bool(), None, state[key])

    def _step_and_select(self, skipped: Tensor) -> None:
        weights = [local_tensor(p) for p in self._weights]
        before = [weight.clone() for weight in weights]
        saved = {(id(state), key): _copy(state[key]) for state, key in self._slots()}
        self.optimizer.step()
        for weight, old in zip(weights, before, strict=True):
            _select(skipped, old, weight)
        for state, key in self._slots():
            value, old_value = state[key], saved.get((id(state), key))
            if torch.is_tensor(value) and not (value.device.type == "cpu" and value.ndim == 0):
                _select(skipped, old_value, value)
            else:
                zero = torch.zeros_like(value) if torch.is_tensor(value) else type(value)(0)
                self._undo.append((state, key, zero if old_value is None else old_value))

    def _slots(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yields the places of the optimizer's state: (dictionary, key). Some optimizers have a step per group."""
        for state in self.optimizer.state.values():
            yield from ((state, key) for key, value in state.items() if torch.is_tensor(value) or key == "step")
        yield from ((group, "step") for group in self.optimizer.param_groups if "step" in group)


def _copy(value: Tensor | float) -> Tensor | float:
    return local_tensor(value).clone() if torch.is_tensor(value) else value


def _select(skipped: Tensor, before: Tensor | float | None, now: Tensor) -> None:
    """Sets `now` to `before` where `skipped`; None: to zero."""
    local = local_tensor(now)
    local.copy_(torch.where(skipped, 0 if before is None else before, local))
