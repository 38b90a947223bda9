"""BatchNorm, whose running averages are state that a forward pass changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

BATCH_NORM = _BatchNorm
"""Of any number of dimensions, synchronised ones too."""

M = TypeVar("M", bound=nn.Module)


@contextlib.contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm normalises by the batch as ever, but its running statistics stay: this is not the batch's only pass."""
    norms = [m for m in model.modules() if isinstance(m, BATCH_NORM) and m.track_running_stats]
    saved = [(m.momentum, m.num_batches_tracked) for m in norms]
    for m in norms:
        m.momentum, m.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for m, (momentum, tracked) in zip(norms, saved, strict=True):
            m.momentum, m.num_batches_tracked = momentum, tracked


def to_dtype(model: M, dtype: torch.dtype) -> M:
    """The model in `dtype`, but BatchNorm not in less than float32: its averages move by too little for 16 bits."""
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, BATCH_NORM):
            module.to(torch.promote_types(dtype, torch.float32))
    return model
