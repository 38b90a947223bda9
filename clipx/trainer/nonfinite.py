"""What follows a loss or a gradient that is infinite or NaN: `optimizer.non_finite`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from clipx.errors import ClipxError
from clipx.optimizer.spec import NonFinite, OptimizerSpec

_ADVICE = "lower optimizer.lr, lengthen schedule.warmup, or set optimizer.clip_norm=1"
_MADE = "the step was not made, and the last checkpoint is from before"


class NonFiniteSteps:
    """Counts the steps that are left out, and brings back what their forward pass has changed in the model.

    `total` and `in_row` belong to the state of a run.
    """

    def __init__(
        self, spec: OptimizerSpec, model: nn.Module, event: Callable[..., None], retries: bool = False
    ) -> None:
        """`retries`: a forward pass may be made again."""
        self._policy, self._limit, self._model, self._event = spec.non_finite, spec.non_finite_limit, model, event
        self._keep = retries or self._policy is NonFinite.skip
        self._buffers: list[tuple[Tensor, Tensor]] = []  # and what they were before the step
        self.total = self.in_row = 0

    def before(self) -> None:
        """Before each forward pass, which puts what is not finite into BatchNorm's running averages too."""
        if self._keep:
            self._buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]

    def undo(self) -> None:
        """What the forward pass has changed, but where the run ends or rolls back anyway."""
        for buffer, before in self._buffers:
            buffer.copy_(before)

    def made(self) -> None:
        """A step was made."""
        self.in_row = 0

    def leave_out(self, step: int, what: str, roll_back: Callable[[], int | None]) -> None:
        """Raises ClipxError unless the run may go on without this step. `roll_back` returns the step it went back to,
        None where there is no checkpoint yet.
        """
        self.total += 1
        self.in_row += 1
        message = f"{what} at step {step}"
        self._event("non_finite", step=step, policy=str(self._policy), message=message)
        if self._policy is NonFinite.stop:
            raise ClipxError(f"{message}: {_ADVICE}; {_MADE}")
        if self.in_row > self._limit:
            raise ClipxError(
                f"{message}, the last of {self.in_row} in a row, more than optimizer.non_finite_limit={self._limit}: "
                f"{_ADVICE}; {_MADE}"
            )
        if self._policy is NonFinite.skip:
            self.undo()
            return
        back = roll_back()
        if back is None:
            raise ClipxError(f"{message}, and there is no checkpoint yet to roll back to: {_ADVICE}")
        self._event("rolled_back", step=step, message=f"the weights are those of step {back}, the data goes on")
