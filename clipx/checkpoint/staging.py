"""Staging memory, laid out as the safetensors file that is written from it, and copies of tensors into it.

Those from a CUDA device run while it computes the next step.
"""

from __future__ import annotations

import json
import logging
import mmap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from clipx.checkpoint.format import write_file
from clipx.checkpoint.tensors import ROW_STARTS, RankRows
from clipx.config.lazy_torch import torch
from clipx.errors import CheckpointError

log = logging.getLogger(__name__)

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

Pairs = Sequence[tuple["torch.Tensor", "torch.Tensor"]]
"""(target, source) of copies. The targets are contiguous."""


class HostCopies:
    """Staging memory, and copies from the CPU into it, which are done when `copy` returns."""

    def allocate(self, size: int) -> torch.Tensor:
        """Returns `size` bytes whose pages are mapped: the first touch of a page takes longer than a copy to it."""
        return torch.zeros(size, dtype=torch.uint8)

    def free(self, memory: torch.Tensor) -> None:
        """Prepares memory of `allocate` for its release. No copy may be in progress."""

    def copy(self, now: Pairs, until_update: Pairs) -> None:
        """Copies the sources as the work queued so far leaves them.

        `now`: their sources may change by any later work. `until_update`: they change only by work that is queued after
        the next `hold_updates`.
        """
        for target, source in (*now, *until_update):
            target.copy_(source)

    def hold_updates(self) -> None:
        """Makes work that is queued from now on start after the copies. The host does not wait."""

    def synchronize(self) -> None:
        """Waits until the copies are done. Any thread may call it. Raises RuntimeError if a copy failed."""


class CudaCopies(HostCopies):
    """Copies from a CUDA device, by its copy engine: the host does not wait, and the device computes meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()
        self._locked: set[int] = set()  # addresses

    def allocate(self, size: int) -> torch.Tensor:
        """Returns page-locked memory, or pageable memory if CUDA refuses to lock it.

        torch's own allocator of it rounds up to a power of two: 8.6 GB for a state of 5.1 GB. A shared mapping is not
        copied when a process forks: its pages remain those that the device writes to.
        """
        memory = torch.frombuffer(mmap.mmap(-1, max(1, size)), dtype=torch.uint8)[:size]
        if not size:
            return memory
        if error := int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)):
            what = f"{size:,} bytes of memory for checkpoints cannot be page-locked"
            log.warning("%s (CUDA error %d): saving takes longer", what, error)
        else:
            self._locked.add(memory.data_ptr())
        return memory

    def free(self, memory: torch.Tensor) -> None:
        if memory.data_ptr() in self._locked:
            self._locked.remove(memory.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def copy(self, now: Pairs, until_update: Pairs) -> None:
        for target, source in now:  # a source on the host is copied at once
            target.copy_(source, non_blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in until_update:
                target.copy_(source, non_blocking=True)
        self._done.record(self._stream)

    def hold_updates(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def synchronize(self) -> None:
        self._done.synchronize()


def copies_from(device: torch.device) -> HostCopies:
    """Returns the copies from a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class StagingBuffer:
    """Memory for one file, filled by `copies`. Allocated on first use and reallocated when more is needed."""

    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        self._header = b""
        self._used = 0
        self._memory: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return len(self._header) + self._used

    def reserve(self, size: int) -> torch.Tensor:
        """Allocates memory for tensors of `size` bytes in total, unless there is enough. Returns it as bytes."""
        if self._memory is None or len(self._memory) < size:
            self.release()  # first: both may not fit
            self._memory = self._copies.allocate(size)
        return self._memory

    def release(self) -> None:
        """Releases the memory. No copy or write may be in progress."""
        if self._memory is not None:
            self._copies.free(self._memory)
        self._memory = None

    def fill(self, tensors: Mapping[str, torch.Tensor | RankRows], until_update: Collection[str] = ()) -> None:
        """Queues copies of the tensors, which are on the host when `HostCopies.synchronize` returns.

        `until_update`: names of tensors that change only after the next `HostCopies.hold_updates`.
        """
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
        self._used = end
        buffer = self.reserve(end)
        now: list[tuple[torch.Tensor, torch.Tensor]] = []
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name in order:
            source = values[name].detach()
            begin, stop = header[name]["data_offsets"]
            target = buffer[begin:stop].view(source.dtype).view(source.shape)
            (later if name in until_update else now).append((target, source))
        self._copies.copy(now, later)

    def write(self, path: Path) -> str:
        """Writes and syncs the file. Returns its SHA-256."""
        assert self._memory is not None
        return write_file(path, [self._header, self._memory.numpy()[: self._used].data])


def _encode_header(header: Mapping[str, Any]) -> bytes:
    """Encodes a safetensors header: the length in 8 bytes, then JSON, padded with spaces to a multiple of 8."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % 8)
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
