"""Tensors of a checkpoint: read by name, in full or by rows, from the files of all ranks."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from clipx.checkpoint.records import Count, DamagedCheckpoint
from clipx.config.lazy_torch import torch
from clipx.errors import CheckpointError, disk_failure
from clipx.storage.safe_json import read_as

ROW_STARTS = "rows"  # key of a shard's metadata: by tensor name, the index of the first row in this file


@dataclass(frozen=True, slots=True)
class RankRows:
    """Rows of a tensor that is sharded over the ranks, on one rank: from index `start` on."""

    tensor: torch.Tensor
    start: int


@dataclass(frozen=True, slots=True)
class _FileSlice:
    """Rows [start, stop) of a tensor in an open safetensors file, or the whole tensor unless `sharded`."""

    start: int
    stop: int
    sharded: bool
    file: Any


class CheckpointTensors(Mapping[str, "torch.Tensor"]):
    """Tensors of a checkpoint by name. Each is read on access and assembled from the files of all ranks."""

    def __init__(self, folder: Path, slices: dict[str, list[_FileSlice]], prefix: str = "") -> None:
        self._folder, self._slices, self._prefix = folder, slices, prefix

    @classmethod
    def open(cls, folder: Path, files: list[str]) -> CheckpointTensors:
        """Opens the files and reads their headers.

        Raises DamagedCheckpoint for a file that is not safetensors, OSError for one that the disk does not read.
        """
        slices: dict[str, list[_FileSlice]] = {}
        for name in files:
            try:
                file: Any = safe_open(folder / name, "pt")
                starts = read_as(dict[str, Count], (file.metadata() or {}).get(ROW_STARTS, "{}"))
                for key in file.keys():  # noqa: SIM118  # not a mapping
                    shape, start = file.get_slice(key).get_shape(), starts.get(key, 0)
                    found = _FileSlice(start, start + sum(shape[:1]), key in starts, file)
                    slices.setdefault(key, []).append(found)
            except (OSError, RuntimeError) as error:
                # Rust's errors have no path; torch, which maps the file, raises no OSError.
                if not isinstance(error, OSError) and disk_failure(error) is None:
                    raise
                raise OSError(errno.EIO, " ".join(str(error).split()), str(folder / name)) from None
            except (SafetensorError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise DamagedCheckpoint(f"{name} is not a safetensors file of a checkpoint ({reason})") from None
        for parts in slices.values():
            parts.sort(key=lambda part: part.start)
        return cls(folder, slices)

    def __getitem__(self, name: str) -> torch.Tensor:
        slices = self._slices[self._prefix + name]
        if slices[0].sharded:
            return self.rows(name, 0, slices[-1].stop)
        tensor: torch.Tensor = slices[0].file.get_tensor(self._prefix + name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._slices if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._prefix + name in self._slices

    def shape(self, name: str) -> list[int]:
        """Returns the shape of the whole tensor, from the headers."""
        slices = self._slices[self._prefix + name]
        shape: list[int] = list(slices[0].file.get_slice(self._prefix + name).get_shape())
        return [slices[-1].stop, *shape[1:]] if shape else shape

    def is_floating_point(self, name: str) -> bool:
        """Returns whether a tensor holds floating point numbers, from the headers."""
        return "F" in self._slices[self._prefix + name][0].file.get_slice(self._prefix + name).get_dtype()

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Reads rows [start, stop) of a tensor. Raises CheckpointError if some are missing."""
        key, at, found = self._prefix + name, start, []
        for part in self._slices.get(key, ()):
            if part.start <= at < min(part.stop, stop):
                end = min(part.stop, stop)
                found.append(part.file.get_slice(key)[at - part.start : end - part.start])
                at = end
        if at < stop:
            raise CheckpointError(
                f"the checkpoint {self._folder} lacks rows {at} to {stop} of {key}: it belongs to another data set, or "
                "a file is missing; restore it, or start a new run"
            )
        if not found:  # start == stop
            return self[name][:0]
        return found[0] if len(found) == 1 else torch.cat(found)

    def sharded_names(self) -> set[str]:
        """Returns the names of the tensors that were saved by rows."""
        return {name for name in self if self._slices[self._prefix + name][0].sharded}

    def select_prefix(self, prefix: str) -> CheckpointTensors:
        """Returns the tensors under `prefix/`, without it in their names."""
        return CheckpointTensors(self._folder, self._slices, f"{self._prefix}{prefix}/")


def slice_rows(tensors: Mapping[str, torch.Tensor], name: str, start: int, stop: int) -> torch.Tensor:
    """Returns rows [start, stop) of a tensor. Reads only these rows from a checkpoint."""
    return tensors.rows(name, start, stop) if isinstance(tensors, CheckpointTensors) else tensors[name][start:stop]
