"""Staging memory for tensors, laid out as the safetensors file that is written from it.

It is allocated once. On the CPU the slow part is not the copy but the first touch of new memory: 1.8 GB took 4.9 s in
pages of 4 KiB, 0.9 s in huge pages, and 0.26 s each time after that.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from clipx.checkpoint.format import write_file
from clipx.checkpoint.tensors import ROW_STARTS, RankRows
from clipx.config.lazy_torch import torch
from clipx.errors import CheckpointError

_DTYPES = {  # torch's dtype names to those of safetensors
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}

# Bytes that a thread copies at a time. These threads synchronize once, torch's threads after each tensor: with other
# work on the cores 1.8 GB took 0.3 s, and 1 to 3 s with torch.
_BLOCK = 8 << 20


class StagingBuffer:
    """Memory for one file, page-locked if `pinned`. Allocated on first use and reallocated when more is needed."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._header = b""
        self._used = 0
        self._buffer: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return len(self._header) + self._used

    def reserve(self, size: int) -> torch.Tensor:
        """Allocates memory for tensors of `size` bytes in total, unless there is enough.

        Returns it as a uint8 tensor.
        """
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = None  # free it first: both may not fit
            if self._pinned or size == 0:
                self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            else:  # NumPy requests huge pages from Linux
                self._buffer = torch.from_numpy(np.empty(size, np.uint8))
        return self._buffer

    def touch(self, size: int) -> None:
        """Reserves memory and maps its pages, so that the first `fill` only copies."""
        buffer = self.reserve(size)
        if not self._pinned:  # page-locked memory is mapped already
            ctypes.memset(buffer.data_ptr(), 0, size)

    def fill(self, tensors: Mapping[str, torch.Tensor | RankRows]) -> None:
        """Copies the tensors. Copies from a GPU may still run when this returns: synchronize before writing."""
        # Tensors in decreasing order of element size, so that each begins at a multiple of its element size.
        values = {name: value.tensor if isinstance(value, RankRows) else value for name, value in tensors.items()}
        order = sorted(values, key=lambda name: (-values[name].element_size(), name))
        header: dict[str, Any] = {}
        end = 0
        for name in order:
            tensor = values[name]
            begin, end = end, end + tensor.nbytes
            header[name] = {"dtype": _dtype(name, tensor), "shape": list(tensor.shape), "data_offsets": [begin, end]}
        starts = {name: value.start for name, value in tensors.items() if isinstance(value, RankRows)}
        metadata = {"format": "pt", ROW_STARTS: json.dumps(starts)} if starts else {"format": "pt"}
        self._header = _encode_header({"__metadata__": metadata, **header})
        buffer = self.reserve(end)
        blocks: list[tuple[int, int, int]] = []
        for name in order:
            tensor = values[name].detach()
            begin, stop = header[name]["data_offsets"]
            target = buffer[begin:stop].view(tensor.dtype).view(tensor.shape)
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                to, of = target.data_ptr(), tensor.data_ptr()
                blocks += [(to + at, of + at, min(_BLOCK, stop - begin - at)) for at in range(0, stop - begin, _BLOCK)]
            else:
                target.copy_(tensor, non_blocking=True)
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(lambda block: ctypes.memmove(*block), blocks))
        self._used = end

    def write(self, path: Path) -> str:
        """Writes and syncs the file. Returns its SHA-256."""
        assert self._buffer is not None
        return write_file(path, [self._header, self._buffer.numpy()[: self._used].data])


def _encode_header(header: Mapping[str, Any]) -> bytes:
    """Encodes a safetensors header: the length in 8 bytes, then JSON, padded with spaces to align the data."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _dtype(name: str, tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        raise CheckpointError(
            f"{name} has dtype {tensor.dtype}, which safetensors does not support: use one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[kind]


# ------------------------------------------------------------------------------------------------ sharded tensors


def rank_rows(tensor: torch.Tensor, name: str) -> RankRows | None:
    """Returns this rank's rows of a DTensor that is sharded by rows, as by FSDP2.

    Returns None for a replicated or plain tensor. Raises CheckpointError for other placements.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(tensor, DTensor):
        return None
    placements, mesh = tensor.placements, tensor.device_mesh
    sharded = [(dim, placement) for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if not sharded:
        return None
    dim, placement = sharded[0]
    if len(sharded) > 1 or type(placement) is not Shard or placement.dim != 0:
        raise CheckpointError(
            f"{name} has placements {placements}: checkpoints support only tensors that are replicated, or sharded by "
            "rows over one mesh dimension, as by fully_shard"
        )
    rank, ranks = mesh.get_local_rank(dim), mesh.size(dim)
    return RankRows(tensor.to_local(), min(rank * -(-len(tensor) // ranks), len(tensor)))


def is_first_copy(tensor: torch.Tensor) -> bool:
    """Returns whether no earlier rank holds the same rows. In hybrid sharding several ranks do."""
    from torch.distributed.tensor import DTensor, Replicate

    return not isinstance(tensor, DTensor) or all(
        tensor.device_mesh.get_local_rank(dim) == 0
        for dim, placement in enumerate(tensor.placements)
        if isinstance(placement, Replicate)
    )


def split_sharded(
    tensors: Mapping[str, torch.Tensor | RankRows], is_main: bool
) -> tuple[dict[str, torch.Tensor], dict[str, RankRows]]:
    """Returns what this rank writes: the replicated tensors (on rank 0 only) and its rows of the sharded tensors."""
    replicated: dict[str, torch.Tensor] = {}
    sharded: dict[str, RankRows] = {}
    for name, value in tensors.items():
        tensor = value.tensor if isinstance(value, RankRows) else value
        rows = value if isinstance(value, RankRows) else rank_rows(value, name)
        if rows is None:
            if is_main:
                replicated[name] = local_tensor(tensor)
        elif len(rows.tensor) and is_first_copy(tensor):
            sharded[name] = rows
    return replicated, sharded


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, without a copy."""
    from torch.distributed.tensor import DTensor

    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
