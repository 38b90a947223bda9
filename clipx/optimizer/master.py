"""Float32 master weights of a model that computes in 16 bits (arXiv:1710.03740, section 3.1)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from clipx.compat import foreach_add_, foreach_copy_
from clipx.model.batchnorm import BATCH_NORM, to_dtype
from clipx.model.clip import CLIP


class MasterWeights:
    """A float32 `master`, which the optimizer updates and a checkpoint stores, and `model`, its copy in `dtype` that
    computes forward and backward.

    Gradients are added to the master's in float32 after each micro-batch, weights are copied from the master to the
    model. Both share BatchNorm's running averages. `averaged`: data parallelism stores the averages over the ranks in
    the master's gradients.
    """

    averaged: bool = False

    def __init__(self, master: CLIP, dtype: torch.dtype) -> None:
        self.model = to_dtype(copy.deepcopy(master), dtype)
        self._pairs = list(zip(self.model.parameters(), master.parameters(), strict=True))
        self.model.register_forward_pre_hook(self._before_forward)
        for own, shared in zip(self.model.modules(), master.modules(), strict=True):
            if isinstance(own, BATCH_NORM):
                for name, buffer in shared.named_buffers(recurse=False):
                    setattr(own, name, buffer)

    @property
    def by_parameter(self) -> dict[nn.Parameter, nn.Parameter]:
        """The master of each parameter of the model."""
        return dict(self._pairs)

    def copy_gradients_from_model(self) -> None:
        """Moves the gradients of the last micro-batch to the master, unless they are there as averages over ranks."""
        if not self.averaged:
            self._add_gradients()
        self.model.zero_grad(set_to_none=True)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        """Moves the gradients of the micro-batch before: in 16 bits a sum of many would lose small gradients."""
        if torch.is_grad_enabled():
            self._add_gradients()

    @torch.no_grad()
    def _add_gradients(self) -> None:
        """Adds the model's gradients to the master's, in the format of the master."""
        found = [(own, master) for own, master in self._pairs if own.grad is not None]
        fresh = [(own, master) for own, master in found if master.grad is None]
        added = [(own, master) for own, master in found if master.grad is not None]
        for _, master in fresh:
            master.grad = torch.empty_like(master)
        for pairs, combine in ((fresh, foreach_copy_), (added, foreach_add_)):
            if pairs:
                combine([_gradient(master) for _, master in pairs], [_gradient(own) for own, _ in pairs])
        for own, _ in found:
            own.grad = None

    @torch.no_grad()
    def copy_weights_to_model(self) -> None:
        """Copies the master's weights to the model, rounded to its format."""
        foreach_copy_([own for own, _ in self._pairs], [master for _, master in self._pairs])


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
