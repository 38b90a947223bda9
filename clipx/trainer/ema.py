"""An exponential moving average of the weights, which often evaluates better than the weights (arXiv:1803.05407)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from clipx.checkpoint.staging import local_tensor
from clipx.checkpoint.state import Tensors, load_module
from clipx.model.clip import CLIP


class WeightAverage:
    """Updates avg ← decay · avg + (1 - decay) · weights after each step, including BatchNorm's statistics.

    The average equals the weights after the first step. `model` holds the averaged weights. It may be sharded over the
    ranks in the same way as the trained model: each rank averages its shards.
    """

    def __init__(self, model: CLIP, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._begun = False

    @torch.no_grad()
    def update(self, model: CLIP) -> None:
        """Updates the average. Call it after each optimizer step."""
        pairs = list(zip(_tensors(self.model), _tensors(model), strict=True))
        averaged = [(own, new) for own, new in pairs if own.is_floating_point()]
        torch._foreach_lerp_([own for own, _ in averaged], [new for _, new in averaged], 1 - self.decay * self._begun)
        for own, new in pairs:
            if not own.is_floating_point():  # counters such as num_batches_tracked
                own.copy_(new)
        self._begun = True

    def state(self) -> Tensors:
        """Returns the averaged weights by name in the model."""
        return dict(self.model.state_dict())

    def restore(self, tensors: Tensors) -> None:
        """Loads the tensors of `state`. Raises CheckpointError."""
        load_module(self.model, tensors, "average")
        self._begun = True


def _tensors(model: CLIP) -> list[Tensor]:
    """Returns this rank's tensors of the state_dict: whole ones, or its shards."""
    return [local_tensor(tensor) for tensor in model.state_dict().values()]
