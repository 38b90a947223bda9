"""Steps whose loss or gradient is infinite or NaN: the device skips them, and the host learns of it later.

The decision is made on the device, where it skips the update. The host reads it while the device computes the next
step, for which it therefore never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipx.distributed.comm import Comm
from clipx.errors import ClipxError
from clipx.model.transfer import HostCopy
from clipx.optimizer.spec import NonFinite, OptimizerSpec

ADVICE = "lower optimizer.lr, lengthen schedule.warmup, or set optimizer.clip_norm=1"
_OLDER = "the step was skipped, and the last checkpoint is older"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step that was not made, for a reason that no loss scale can change: `optimizer.non_finite` applies."""

    step: int
    message: str
    consecutive: int  # skipped steps in a row, with this one

    def rolls_back(self, spec: OptimizerSpec, warn: Callable[..., None]) -> bool:
        """Reports the step by `warn`. Returns whether to restore a checkpoint. Raises ClipxError if the run must stop.

        Call it on all ranks.
        """
        policy, limit = spec.non_finite, spec.non_finite_limit
        # An error that ends the run, or the report of a rollback, repeats the message.
        logged = policy is NonFinite.skip and self.consecutive <= limit
        warn("non_finite", self.message, logged=logged, step=self.step, policy=str(policy))
        if policy is NonFinite.stop:
            raise ClipxError(f"{self.message}: {ADVICE}; {_OLDER}")
        if self.consecutive > limit:
            raise ClipxError(
                f"{self.message}, the last of {self.consecutive} in a row, more than optimizer.non_finite_limit="
                f"{limit}: {ADVICE}; {_OLDER}"
            )
        return policy is NonFinite.rollback


class NonFiniteSteps:
    """Decides on the device which steps are skipped, and counts them on the host.

    `total`, `consecutive` and `overflows` are part of a run's state. `found_inf` is the decision about the last step,
    as in torch.amp: 0-dim float32, 1 if its loss or gradient is not finite on any rank.

    As with torch.amp.GradScaler, gradients that overflow in float16 are usual: such a step halves the loss scale, and
    counts in `overflows` alone, unless the scale is 1 or less already.
    """

    found_inf: Tensor

    def __init__(self, spec: OptimizerSpec, model: nn.Module, comm: Comm, scaler: torch.amp.GradScaler) -> None:
        self._model, self._comm, self._scaler = model, comm, scaler
        self.preserves = spec.non_finite is NonFinite.skip or scaler.is_enabled()
        """True if a skipped step changes no state. False if the run then ends or restores a checkpoint anyway."""
        self._buffers: list[tuple[Tensor, Tensor]] = []  # each with its values before the step
        self._pending: tuple[int, HostCopy] | None = None  # a step, and what of it is finite
        self.total = self.consecutive = self.overflows = 0

    def before_forward(self) -> None:
        """Copies the model's buffers, since a forward pass adds non-finite values to BatchNorm's running averages."""
        if self.preserves:
            self._buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]

    def decide(self, loss: Tensor, norm: Tensor, outputs: Tensor) -> Tensor:
        """Returns `found_inf` of a step, without reading anything.

        Args:
            loss: global loss.
            norm: norm of the gradient over all ranks.
            outputs: whether the outputs of the model on this rank are finite, to name the ranks where they are not.
        """
        self._finite = torch.stack([loss.isfinite(), norm.isfinite(), outputs])
        self.found_inf = (~self._finite[:2].all()).float()
        self._scale = self._current_scale() if self._scaler.is_enabled() else None
        return self.found_inf

    def after_update(self, step: int) -> None:
        """Restores the buffers if the step is skipped, and starts to copy the decision about it to the host."""
        for buffer, before in self._buffers:
            buffer.copy_(torch.where(self.found_inf.bool(), before, buffer))
        self._buffers = []
        found = self._finite
        if self._scale is not None:
            lowered = (self._scale > 1) & (self._current_scale() < self._scale)
            found = torch.cat([found, lowered[None]])
        self._pending = step, HostCopy(found)

    def _current_scale(self) -> Tensor:
        """Returns the loss scale, 0-dim on the device."""
        scale: Tensor = self._scaler.scale(torch.ones((), device=self._comm.device))
        return scale

    @property
    def is_pending(self) -> bool:
        """True if the decision about the last step has not been read."""
        return self._pending is not None

    def read(self) -> Skipped | None:
        """Reads and counts the decision about the last step. Returns None if the step was made, or overflowed.

        Waits for the device until the decision was made. Collective if the step was skipped.
        """
        assert self._pending is not None
        (step, copy), self._pending = self._pending, None
        loss, norm, outputs, *lowered = copy.read()
        self.made = bool(loss and norm)
        if self.made:
            self.consecutive = 0
        elif loss and any(lowered):
            self.overflows += 1
        else:
            self.total += 1
            self.consecutive += 1
            what = "the gradient is" if loss else self._name_ranks(not outputs)
            return Skipped(step, f"{what} not finite at step {step}", self.consecutive)
        return None

    def _name_ranks(self, here: bool) -> str:
        """Names the ranks whose outputs of the model are not finite. Collective."""
        ranks = [str(rank) for rank, bad in enumerate(self._comm.gather_objects(here)) if bad]
        return f"the embeddings of rank {', '.join(ranks)} are" if ranks else "the loss is"


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, float]:
    """Returns the scale and the steps since it changed, for a checkpoint; empty if disabled. Waits for the device."""
    state = scaler.state_dict()
    return {"scale": state["scale"], "steps": state["_growth_tracker"]} if state else {}


def restore_scaler(scaler: torch.amp.GradScaler, state: Mapping[str, float]) -> None:
    """Restores the result of `scaler_state`. If it is empty, from a run without scaling, the initial scale stays."""
    if scaler.is_enabled() and state:
        now = scaler.state_dict()
        scaler.load_state_dict({**now, "scale": state["scale"], "_growth_tracker": int(state["steps"])})
