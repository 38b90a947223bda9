"""An exponential moving average of the weights, which often evaluates better than the weights (arXiv:1803.05407)."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clipx.checkpoint.staging import local_tensor
from clipx.checkpoint.state import Tensors, load_module
from clipx.compat import foreach_copy_, foreach_lerp_
from clipx.model.clip import CLIP

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class WeightAverage:
    """Updates avg ← decay · avg + (1 - decay) · weights after each step, including BatchNorm's statistics.

    The average equals the weights after the first step. `model` holds the averaged weights. It may be sharded over the
    ranks in the same way as the trained model: each rank averages its shards.
    """

    def __init__(self, model: CLIP, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._begun = False
        # Averages and weights, which may be sharded; averages, buffers, and the buffers after the last step.
        self._pairs: list[tuple[Tensor, Tensor]] | None = None
        self._buffers: list[tuple[Tensor, Tensor, Tensor]] = []
        self._sharded: list[FSDPModule] = []  # modules of the average whose evaluation may leave gathered weights

    @torch.no_grad()
    def observe(self, model: CLIP) -> None:
        """Copies the buffers after a step: the next forward pass may change them before `update`.

        Call it after each optimizer step with the same model, whose tensors stay the same.
        """
        if self._pairs is None:
            pairs = list(zip(*(m.state_dict(keep_vars=True).values() for m in (self.model, model)), strict=True))
            self._pairs = [pair for pair in pairs if isinstance(pair[1], nn.Parameter)]
            self._buffers = [(own, new, new.clone()) for own, new in pairs if not isinstance(new, nn.Parameter)]
            if any(local_tensor(own) is not own for own, _ in self._pairs):
                from torch.distributed.fsdp import FSDPModule

                self._sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        if self._buffers:
            foreach_copy_([after for _, _, after in self._buffers], [new for _, new, _ in self._buffers])

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average from the current weights and the observed buffers. Call it if the step was not skipped,
        before the next step of the optimizer."""
        assert self._pairs is not None
        for module in self._sharded:
            module.reshard()  # else the next evaluation uses the weights that an earlier one gathered
        pairs = [(local_tensor(own), local_tensor(new)) for own, new in self._pairs]
        pairs += [(own, after) for own, _, after in self._buffers if own.is_floating_point()]
        counters = [(own, after) for own, _, after in self._buffers if not own.is_floating_point()]
        foreach_lerp_([own for own, _ in pairs], [new for _, new in pairs], 1 - self.decay * self._begun)
        if counters:  # such as num_batches_tracked
            foreach_copy_([own for own, _ in counters], [after for _, after in counters])
        self._begun = True

    def state(self) -> Tensors:
        """Returns the averaged weights by name in the model."""
        return dict(self.model.state_dict())

    def restore(self, tensors: Tensors) -> None:
        """Loads the tensors of `state`. Raises CheckpointError."""
        load_module(self.model, tensors, "average")
        self._begun = True
