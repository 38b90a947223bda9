"""Float32 master weights of a model that computes in 16 bits (arXiv:1710.03740, section 3.1)."""

from __future__ import annotations

import copy

import torch

from clipx.model.batchnorm import BATCH_NORM, to_dtype
from clipx.model.clip import CLIP


class MasterWeights:
    """`master` is what the optimizer steps and a checkpoint holds; `model`, its copy in `dtype`, is what computes.

    Gradients go from the model to the master, weights back. BatchNorm's averages are the same tensors in both.
    """

    def __init__(self, master: CLIP, dtype: torch.dtype) -> None:
        self.master, self.model = master, to_dtype(copy.deepcopy(master), dtype)
        self._pairs = list(zip(self.model.parameters(), master.parameters(), strict=True))
        for own, shared in zip(self.model.modules(), master.modules(), strict=True):
            if isinstance(own, BATCH_NORM):
                for name, buffer in shared.named_buffers(recurse=False):
                    setattr(own, name, buffer)

    def copy_gradients_from_model(self) -> None:
        """Moves the model's gradients to the master, in its own format."""
        for own, master in self._pairs:
            if own.grad is not None:
                master.grad = own.grad.to(master.dtype)
                own.grad = None

    @torch.no_grad()
    def copy_weights_to_model(self) -> None:
        """Rounds the master's weights into the model."""
        torch._foreach_copy_([own for own, _ in self._pairs], [master for _, master in self._pairs])
