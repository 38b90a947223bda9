"""Float32 master weights of a model that computes in 16 bits (arXiv:1710.03740, section 3.1)."""

from __future__ import annotations

import copy

import torch

from clipx.model.batchnorm import BATCH_NORM, to_dtype
from clipx.model.clip import CLIP


class MasterWeights:
    """A float32 `master`, which the optimizer updates and a checkpoint stores, and `model`, its copy in `dtype` that
    computes forward and backward.

    Gradients are copied from the model to the master, weights from the master to the model. Both share BatchNorm's
    running averages.
    """

    def __init__(self, master: CLIP, dtype: torch.dtype) -> None:
        self.master, self.model = master, to_dtype(copy.deepcopy(master), dtype)
        self._pairs = list(zip(self.model.parameters(), master.parameters(), strict=True))
        for own, shared in zip(self.model.modules(), master.modules(), strict=True):
            if isinstance(own, BATCH_NORM):
                for name, buffer in shared.named_buffers(recurse=False):
                    setattr(own, name, buffer)

    def copy_gradients_from_model(self) -> None:
        """Moves the model's gradients to the master, converted to its format."""
        for own, master in self._pairs:
            if own.grad is not None:
                master.grad = own.grad.to(master.dtype)
                own.grad = None

    @torch.no_grad()
    def copy_weights_to_model(self) -> None:
        """Copies the master's weights to the model, rounded to its format."""
        torch._foreach_copy_([own for own, _ in self._pairs], [master for _, master in self._pairs])
