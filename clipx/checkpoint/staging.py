"""Memory that tensors are copied into, laid out as the safetensors file that is written from it.

Allocated once: on the CPU it is not copying that costs, but the first touch of fresh memory (1.8 GB took 4.9 s in pages
of 4 KiB, 0.9 s in huge ones, and 0.26 s each time after).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clipx.checkpoint.format import ROWS, RankRows, write_file
from clipx.config.lazy_torch import torch
from clipx.errors import CheckpointError

_DTYPES = {  # of safetensors, by torch's names
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


# Bytes. Threads that take such blocks as they come wait for each other once, those of torch at the end of each tensor:
# with other work on the cores 1.8 GB took 0.3 s so, and 1 to 3 s by torch.
_BLOCK = 8 << 20


class StagingBuffer:
    """A file's worth of memory, page-locked where `pinned`. Made on first use, and again when more is needed."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._header = b""
        self._used = 0
        self._buffer: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._header) + self._used

    def reserve(self, size: int) -> None:
        """Makes room for tensors of so many bytes together, so that `fill` has only to copy."""
        if self._buffer is None or len(self._buffer) < size:
            buffer = self._room(size)
            if not self._pinned:  # page-locked memory is there already
                ctypes.memset(buffer.data_ptr(), 0, size)

    def fill(self, tensors: Mapping[str, torch.Tensor | RankRows]) -> None:
        """Copies the tensors. From a GPU they are on their way when this returns: synchronize before writing."""
        # The largest items first, so that each begins at a multiple of its size.
        parts = {name: value if isinstance(value, RankRows) else RankRows(value, 0) for name, value in tensors.items()}
        order = sorted(parts, key=lambda name: (-parts[name].tensor.element_size(), name))
        header: dict[str, Any] = {}
        end = 0
        for name in order:
            tensor = parts[name].tensor
            begin, end = end, end + tensor.nbytes
            header[name] = {"dtype": _dtype(name, tensor), "shape": list(tensor.shape), "data_offsets": [begin, end]}
        starts = {name: value.start for name, value in tensors.items() if isinstance(value, RankRows)}
        metadata = {"format": "pt", ROWS: json.dumps(starts)} if starts else {"format": "pt"}
        self._header = _encoded({"__metadata__": metadata, **header})
        buffer = self._room(end)
        blocks: list[tuple[int, int, int]] = []
        for name in order:
            tensor = parts[name].tensor.detach()
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
        """Writes the file and waits until it is on disk. Returns its SHA-256."""
        assert self._buffer is not None
        return write_file(path, [self._header, self._buffer.numpy()[: self._used].data])

    def _room(self, size: int) -> torch.Tensor:
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = None  # first: both may not fit
            self._buffer = _allocated(size, self._pinned)
        return self._buffer


def _allocated(size: int, pinned: bool) -> torch.Tensor:
    if pinned or size == 0:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    memory = mmap.mmap(-1, size)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _encoded(header: Mapping[str, Any]) -> bytes:
    """As safetensors has it: the length in 8 bytes, then JSON, filled up with spaces so that the data is aligned."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _dtype(name: str, tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        raise CheckpointError(
            f"{name} is of {tensor.dtype}, which safetensors does not hold: keep it as one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[kind]


# -------------------------------------------------------------------------------- what is spread over the ranks


def rank_rows(tensor: torch.Tensor, name: str) -> RankRows | None:
    """This rank's part of a DTensor that is spread by rows, as FSDP2 does it. None of one that all ranks have alike.

    Raises CheckpointError for other placements.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(tensor, DTensor):
        return None
    placements, mesh = tensor.placements, tensor.device_mesh
    over = [(dim, placement) for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if not over:
        return None
    dim, placement = over[0]
    if len(over) > 1 or type(placement) is not Shard or placement.dim != 0:
        raise CheckpointError(
            f"{name} is placed as {placements}: checkpoints hold what is whole on each rank, or spread by rows over "
            "one dimension of the mesh, as by fully_shard"
        )
    rank, ranks = mesh.get_local_rank(dim), mesh.size(dim)
    return RankRows(tensor.to_local(), min(rank * -(-len(tensor) // ranks), len(tensor)))


def is_first_copy(tensor: torch.Tensor) -> bool:
    """Whether no rank before this one has the same rows, as in hybrid sharding several have."""
    from torch.distributed.tensor import DTensor, Replicate

    return not isinstance(tensor, DTensor) or all(
        tensor.device_mesh.get_local_rank(dim) == 0
        for dim, placement in enumerate(tensor.placements)
        if isinstance(placement, Replicate)
    )


def split_sharded(
    tensors: Mapping[str, torch.Tensor | RankRows], is_main: bool
) -> tuple[dict[str, torch.Tensor], dict[str, RankRows]]:
    """What this process writes: rank 0 what all have alike, each rank its own rows of the others."""
    whole: dict[str, torch.Tensor] = {}
    spread: dict[str, RankRows] = {}
    for name, value in tensors.items():
        if isinstance(value, RankRows):
            rows: RankRows | None = value
        else:
            rows = rank_rows(value, name)
            if rows is None and is_main:
                whole[name] = local_tensor(value)
            if not is_first_copy(value):
                continue
        if rows is not None and len(rows.tensor):
            spread[name] = rows
    return whole, spread


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, in the same memory."""
    from torch.distributed.tensor import DTensor

    held: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held
