"""Memory of the rows of samples: reused within a loader process, shared with the trainer, and used again once it drops
them.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy

from clipx.compat import new_shared, open_shared, share_fd
from clipx.data.batch import PART_SAMPLES
from clipx.data.loader_process import this_process
from clipx.errors import DataError

_KEPT = 16  # files of a process that are used again


def empty_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised tensor of rows. In a loader process it is memory of the last call for such rows."""
    if not this_process().sends_batches:
        return torch.empty(shape, dtype=dtype)
    buffers, row = this_process().row_buffers, (shape[1:], dtype)
    if row not in buffers or len(buffers[row]) < shape[0]:
        buffers[row] = torch.empty(shape, dtype=dtype)
    return buffers[row][: shape[0]]


def shared_rows(rows: Tensor) -> Tensor:
    """Copies rows of a loader process to shared memory, see copy_to_shared. Returns others unchanged."""
    return copy_to_shared(rows) if this_process().sends_batches and rows.nbytes else rows


def copy_to_shared(rows: Tensor) -> Tensor:
    """Copies contiguous rows to memory that is shared with the trainer.

    Rows that are computed in new shared memory take longer than rows that are copied to it: a page that is first
    written through a mapping costs a page fault, a page that is written to the file does not. Raises DataError if the
    shared memory is full.
    """
    by_file = get_sharing_strategy() == "file_descriptor"  # not on macOS
    try:
        storage = _storage(rows.nbytes) if by_file else new_shared(rows.nbytes)
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"{rows.nbytes / 1e6:,.1f} MB of shared memory for samples cannot be allocated ({error}): "
            f"each loader process keeps data.prefetch batches there, of at most {PART_SAMPLES} samples; lower "
            "data.workers or data.prefetch, or give the machine or container more /dev/shm, e.g. with docker's "
            "--shm-size"
        ) from None
    shared = torch.empty(0, dtype=rows.dtype).set_(storage).view(rows.shape)
    if not by_file:
        return shared.copy_(rows)
    file, _ = share_fd(storage)
    left = memoryview(rows.numpy().reshape(-1).view(np.uint8).data)
    while left:
        left = left[os.pwrite(file, left, rows.nbytes - len(left)) :]
    return shared


def _storage(size: int) -> torch.UntypedStorage:
    """Returns `size` bytes of shared memory: an earlier file of this process that is unused by now, or new memory.

    New pages take most of the time of a copy: 0.08 ms for an image of 224 pixels on a virtual machine, instead of 0.02.
    CPU time of the loader for an image of 256 pixels (AMD EPYC of Zen 4, 2 workers, 2026-11-27): 656 µs, instead of 722
    with new memory that is written as here, and 765 with new memory that is written by `share_memory_`.
    """
    kept = this_process().shared_files
    unused = sorted((os.fstat(file).st_size, file) for file in kept if _is_unused(file))
    if not unused:
        storage: torch.UntypedStorage = new_shared(size)
        if len(kept) < _KEPT:
            with suppress(OSError):  # without /proc all memory is new
                kept.append(_reopened(share_fd(storage)[0]))
        return storage
    length, file = next((found for found in unused if found[0] >= size), unused[-1])
    if length < size:
        os.posix_fallocate(file, 0, size)
    opened = _reopened(file)
    try:
        again: torch.UntypedStorage = open_shared(opened, size)
    finally:
        os.close(opened)
    return again


def _reopened(file: int) -> int:
    """Opens an open file again: the kernel counts both."""
    return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)


def _is_unused(file: int) -> bool:
    """Returns whether nothing but this descriptor refers to a file: no other descriptor, no tensor in any process.

    The kernel grants a write lease on a file only if it is open nowhere else. A mapping keeps a file open, and so does
    a message with its descriptor that has not been received. Where there are no leases, no file is ever unused.
    """
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):  # macOS has no F_SETLEASE
        return False
    return True
