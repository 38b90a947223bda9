"""What follows a loss or a gradient that is infinite or NaN: `optimizer.non_finite`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from clipx.errors import ClipxError
from clipx.optimizer.spec import NonFinite, OptimizerSpec

_ADVICE = "lower optimizer.lr, lengthen schedule.warmup, or set optimizer.clip_norm=1"
_MADE = "the step was not made, and the last checkpoint is from before"


class NotFiniteError(ClipxError):
    """The loss or the gradient is infinite or NaN. Raised on all ranks, before anything but gradients has changed."""


class NonFiniteSteps:
    """Counts skipped steps and applies `optimizer.non_finite` to them: stop, skip or roll back.

    `total` and `consecutive` belong to the state of a run.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        model: nn.Module,
        retries: bool,
        report: Callable[..., None],
        roll_back: Callable[[], int | None],
    ) -> None:
        """`retries`: a batch may be computed again. `roll_back` restores the newest checkpoint and returns its step, or
        None where there is none."""
        self._policy, self._limit, self._model = spec.non_finite, spec.non_finite_limit, model
        self._report, self._roll_back = report, roll_back
        self._keep = retries or self._policy is NonFinite.skip
        self._buffers: list[tuple[Tensor, Tensor]] = []  # each with its values before the step
        self.total = self.consecutive = 0

    def before_forward(self) -> None:
        """Keeps the model's buffers: a forward pass puts what is not finite into BatchNorm's running averages too."""
        if self._keep:
            self._buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]

    def restore_buffers(self) -> None:
        """Restores the buffers as they were before the forward pass, unless the run ends or rolls back anyway."""
        for buffer, before in self._buffers:
            buffer.copy_(before)

    def step_made(self) -> None:
        self.consecutive = 0

    def skip(self, step: int, reason: str) -> None:
        """Raises ClipxError unless the run may go on without this step."""
        self.total += 1
        self.consecutive += 1
        message = f"{reason} at step {step}"
        self._report("non_finite", step=step, policy=str(self._policy), message=message)
        if self._policy is NonFinite.stop:
            raise ClipxError(f"{message}: {_ADVICE}; {_MADE}")
        if self.consecutive > self._limit:
            raise ClipxError(
                f"{message}, the last of {self.consecutive} in a row, more than optimizer.non_finite_limit="
                f"{self._limit}: {_ADVICE}; {_MADE}"
            )
        if self._policy is NonFinite.skip:
            self.restore_buffers()
            return
        restored = self._roll_back()
        if restored is None:
            raise ClipxError(f"{message}, and there is no checkpoint yet to roll back to: {_ADVICE}")
        self._report("rolled_back", step=step, message=f"the weights are those of step {restored}, the data goes on")
