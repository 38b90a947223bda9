"""BatchNorm helpers: its running statistics are state that a forward pass changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Classes of BatchNorm, of which those of timm are subclasses."""

M = TypeVar("M", bound=nn.Module)


@contextlib.contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Preserves BatchNorm's running statistics during a further pass over the same batch.

    BatchNorm still normalizes by the statistics of the batch. It counts the pass in a copy of its counter, because
    nn.SyncBatchNorm requires a counter and increments it in place.
    """
    norms = [m for m in model.modules() if isinstance(m, BATCH_NORM) and m.track_running_stats]
    saved = [(m.momentum, m.num_batches_tracked) for m in norms]
    for m, (_, tracked) in zip(norms, saved, strict=True):
        m.momentum, m.num_batches_tracked = 0.0, None if tracked is None else tracked.clone()
    try:
        yield
    finally:
        for m, (momentum, tracked) in zip(norms, saved, strict=True):
            m.momentum, m.num_batches_tracked = momentum, tracked


def to_dtype(model: M, dtype: torch.dtype) -> M:
    """Casts the model to `dtype`, but BatchNorm to at least float32: its averages change by too little for 16 bits.

    So are buffers that the class attribute `constants` of their module names.
    """
    wide = torch.promote_types(dtype, torch.float32)
    constants = [
        (module, name, module.get_buffer(name))
        for module in model.modules()
        for name in getattr(type(module), "constants", ())
        if name in dict(module.named_buffers(recurse=False))
    ]
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, BATCH_NORM):
            module.to(wide)
    for module, name, constant in constants:
        setattr(module, name, constant.to(wide))
    return model
