"""Memory of the rows of samples: reused within a loader process, shared with the trainer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from clipx.data.shared_memory import copy_to_shared


def empty_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised tensor of rows. In a loader process it is memory of the last call for such rows."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    row = (shape[1:], dtype)
    if row not in _reused or len(_reused[row]) < shape[0]:
        _reused[row] = torch.empty(shape, dtype=dtype)
    return _reused[row][: shape[0]]


_reused: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
"""Rows of this loader process by shape and type of a row."""


def shared_rows(rows: Tensor) -> Tensor:
    """Copies rows of a loader process to shared memory, see copy_to_shared. Returns others unchanged."""
    return rows if get_worker_info() is None or not rows.nbytes else copy_to_shared(rows)
