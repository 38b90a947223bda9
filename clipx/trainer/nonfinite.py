"""Reaction to a loss or a gradient that is infinite or NaN: `optimizer.non_finite`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from clipx.errors import ClipxError
from clipx.optimizer.spec import NonFinite, OptimizerSpec

_ADVICE = "lower optimizer.lr, lengthen schedule.warmup, or set optimizer.clip_norm=1"
_SKIPPED = "the step was skipped, and the last checkpoint is older"


class NotFiniteError(ClipxError):
    """The loss or the gradient is infinite or NaN. Raised on all ranks, before any state other than gradients and
    buffers has changed."""


class NonFiniteSteps:
    """Counts skipped steps and applies `optimizer.non_finite` to them: stop, skip or roll back.

    `total` and `consecutive` are part of a run's state.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        model: nn.Module,
        retries: bool,
        report: Callable[..., None],
        roll_back: Callable[[], int | None],
    ) -> None:
        """Stores policy and callbacks. `retries`: a batch may be computed again. `report` logs an event. `roll_back`
        restores the newest checkpoint and returns its step, or None if there is none."""
        self._policy, self._limit, self._model = spec.non_finite, spec.non_finite_limit, model
        self._report, self._roll_back = report, roll_back
        self._keep = retries or self._policy is NonFinite.skip
        self._buffers: list[tuple[Tensor, Tensor]] = []  # each with its values before the step
        self.total = self.consecutive = 0

    def before_forward(self) -> None:
        """Copies the model's buffers, since a forward pass adds non-finite values to BatchNorm's running averages."""
        if self._keep:
            self._buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]

    def restore_buffers(self) -> None:
        """Restores the buffers to their values before the forward pass. No effect where the run stops or rolls back."""
        for buffer, before in self._buffers:
            buffer.copy_(before)

    def step_made(self) -> None:
        """Resets the count of consecutive skipped steps."""
        self.consecutive = 0

    def skip(self, step: int, reason: str) -> None:
        """Counts and reports a skipped step. Raises ClipxError unless the run may continue."""
        self.total += 1
        self.consecutive += 1
        message = f"{reason} at step {step}"
        # An error that ends the run, or the report of a rollback, repeats the message.
        logged = self._policy is NonFinite.skip and self.consecutive <= self._limit
        self._report("non_finite", step=step, policy=str(self._policy), message=message, logged=logged)
        if self._policy is NonFinite.stop:
            raise ClipxError(f"{message}: {_ADVICE}; {_SKIPPED}")
        if self.consecutive > self._limit:
            raise ClipxError(
                f"{message}, the last of {self.consecutive} in a row, more than optimizer.non_finite_limit="
                f"{self._limit}: {_ADVICE}; {_SKIPPED}"
            )
        if self._policy is NonFinite.skip:
            self.restore_buffers()
            return
        restored = self._roll_back()
        if restored is None:
            raise ClipxError(f"{message}, and there is no checkpoint to roll back to: {_ADVICE}")
        restored_to = f"restored the weights of step {restored}; the data continues after this batch"
        self._report("rolled_back", step=step, message=f"{message}: {restored_to}")
