"""A moving average of the weights, which often evaluates better than the weights themselves (arXiv:1803.05407)."""

from __future__ import annotations

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from clipx.checkpoint.state import Tensors, load_module
from clipx.model.clip import CLIP


class WeightAverage:
    """avg ← decay · avg + (1 - decay) · weights after each step, BatchNorm's statistics too; at first the weights."""

    def __init__(self, model: CLIP, decay: float) -> None:
        self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self._averaged.requires_grad_(False)

    @property
    def model(self) -> CLIP:
        """The model with the averaged weights."""
        module = self._averaged.module
        assert isinstance(module, CLIP)
        return module

    def update(self, model: CLIP) -> None:
        """Called after each optimizer step."""
        self._averaged.update_parameters(model)

    def state(self) -> Tensors:
        """By the model's own names."""
        return dict(self.model.state_dict())

    def restore(self, tensors: Tensors) -> None:
        """The inverse of `state`. Raises CheckpointError."""
        load_module(self.model, tensors, "average")
        self._averaged.n_averaged.fill_(1)  # at 0 the next update would take the weights as they are
