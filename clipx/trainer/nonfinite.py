"""Reaction to a loss or a gradient that is infinite or NaN: `optimizer.non_finite`.

The decision is made on the device, where it skips the step, and is read by the host during the next step: the host
never waits for the device in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn

from clipx.distributed.comm import Comm
from clipx.errors import ClipxError
from clipx.model.transfer import HostCopy
from clipx.optimizer.spec import NonFinite, OptimizerSpec

_ADVICE = "lower optimizer.lr, lengthen schedule.warmup, or set optimizer.clip_norm=1"
_SKIPPED = "the step was skipped, and the last checkpoint is older"


class Outcome(Enum):
    """Result of a step, as the host reads it later."""

    made = auto()
    skipped = auto()
    rolled_back = auto()  # skipped, and the state is that of the last checkpoint


class NonFiniteSteps:
    """Decides on the device which steps are skipped, counts them and applies `optimizer.non_finite`.

    `total` and `consecutive` are part of a run's state. `found_inf` is the decision about the last step, as in
    torch.amp: 0-dim float32, 1 if its loss or gradient is not finite on any rank.
    """

    found_inf: Tensor

    def __init__(
        self,
        spec: OptimizerSpec,
        model: nn.Module,
        comm: Comm,
        retries: bool,
        report: Callable[..., None],
        roll_back: Callable[[], int | None],
    ) -> None:
        """Stores policy and callbacks. `retries`: a batch may be computed again. `report` logs an event. `roll_back`
        restores the newest checkpoint and returns its step, or None if there is none."""
        self._policy, self._limit, self._model, self._comm = spec.non_finite, spec.non_finite_limit, model, comm
        self._report, self._roll_back = report, roll_back
        self._keep = retries or self._policy is NonFinite.skip
        self._buffers: list[tuple[Tensor, Tensor]] = []  # each with its values before the step
        self._pending: tuple[int, HostCopy] | None = None  # a step, and what of it is finite
        self.total = self.consecutive = 0

    def before_forward(self) -> None:
        """Copies the model's buffers, since a forward pass adds non-finite values to BatchNorm's running averages."""
        if self._keep:
            self._buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]

    def observe(self, outputs: Sequence[Tensor]) -> None:
        """Stores whether this rank's outputs of the model are finite, to name the ranks where they are not."""
        self._outputs = torch.stack([output.detach().isfinite().all() for output in outputs]).all()

    def decide(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Returns `found_inf` of a step from its global loss and gradient norm, without reading them."""
        self._finite = torch.stack([loss.isfinite(), norm.isfinite(), self._outputs])
        self.found_inf = (~self._finite[:2].all()).float()
        return self.found_inf

    def restore_buffers(self) -> None:
        """Restores the buffers to their values before the forward pass if the step is skipped. No effect where the run
        stops or rolls back."""
        skipped = self.found_inf.bool() if self._buffers else None
        for buffer, before in self._buffers:
            buffer.copy_(torch.where(skipped, before, buffer))  # type: ignore[arg-type]
        self._buffers = []

    def record(self, step: int) -> None:
        """Starts to copy the decision about `step` to the host."""
        self._pending = step, HostCopy(self._finite)

    def read(self) -> Outcome | None:
        """Returns the outcome of the recorded step, or None if it was read before. Applies the policy to a skipped one.

        Waits for the device until the decision was made. Collective if the step was skipped. Raises ClipxError if the
        run must stop.
        """
        if self._pending is None:
            return None
        (step, finite), self._pending = self._pending, None
        loss, norm, outputs = finite.read()
        if loss and norm:
            self.consecutive = 0
            return Outcome.made
        what = "the gradient is" if loss else self._name_ranks(not outputs)
        return self._skip(step, f"{what} not finite")

    def _name_ranks(self, here: bool) -> str:
        """Names the ranks whose outputs of the model are not finite. Collective."""
        ranks = [str(rank) for rank, bad in enumerate(self._comm.gather_objects(here)) if bad]
        return f"the embeddings of rank {', '.join(ranks)} are" if ranks else "the loss is"

    def _skip(self, step: int, reason: str) -> Outcome:
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
            return Outcome.skipped
        restored = self._roll_back()
        if restored is None:
            raise ClipxError(f"{message}, and there is no checkpoint to roll back to: {_ADVICE}")
        restored_to = f"restored the weights of step {restored}; the data continues after this batch"
        self._report("rolled_back", step=step, message=f"{message}: {restored_to}")
        return Outcome.rolled_back
