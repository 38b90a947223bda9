"""Checkpoint format on disk: reading, verification and atomic commit.

    checkpoints/step-00000010/tensors.safetensors                tensors that are replicated over the ranks
                              shard.00002-of-00008.safetensors   a rank's rows of tensors that are sharded over them
                              state.json                         counters, data position, configuration
                              MANIFEST.json                      SHA-256 of the other files; written last

A checkpoint is written to `tmp.*`, synced, then renamed. The newest folder whose files match its manifest is the latest
checkpoint.

A tensor has the same name in all files, and is read in full or by rows, on any number of ranks. torch's distributed
checkpoints are neither written nor read: loading one unpickles its `.metadata`, which can execute code, and a flipped
bit in it is not detected.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from clipx.checkpoint.resume import is_checkpoint, step_folder, step_of
from clipx.config.lazy_torch import torch
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "MANIFEST.json"
ROW_STARTS = "rows"  # key of a shard's metadata: by tensor name, the index of the first row in this file
_REQUIRED = (TENSORS, STATE)
_WRITE_BYTES = 16 << 20  # writing took twice as long with 1 MiB


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
        """Opens the files and reads their headers. Raises CheckpointError for a file that is not safetensors."""
        slices: dict[str, list[_FileSlice]] = {}
        for name in files:
            try:
                file: Any = safe_open(folder / name, "pt")
                starts = json.loads((file.metadata() or {}).get(ROW_STARTS, "{}"))
                for key in file.keys():  # noqa: SIM118  # not a mapping
                    shape, start = file.get_slice(key).get_shape(), int(starts.get(key, 0))
                    stop = start + shape[0] if shape else 0
                    slices.setdefault(key, []).append(_FileSlice(start, stop, key in starts, file))
            except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{folder / name} is not a safetensors file ({error}): restore it") from error
        return cls(folder, {key: sorted(found, key=lambda part: part.start) for key, found in slices.items()})

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

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Reads rows [start, stop) of a tensor. Raises CheckpointError if some are missing."""
        key, at, found = self._prefix + name, start, []
        for part in self._slices[key]:
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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State of a run: tensors by name, and plain values. `folder` is the folder it was read from."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    state: dict[str, Any]
    folder: Path | None = None
    keep: bool = False  # never deleted by the retention policy
    score: float | None = None  # higher is better

    def sharded_names(self) -> set[str]:
        """Returns the names of the tensors that were saved by rows."""
        return self.tensors.sharded_names() if isinstance(self.tensors, CheckpointTensors) else set()

    def read_rows(self, name: str, rows: RankRows) -> None:
        """Fills `rows.tensor` with the rows of a tensor from index `rows.start` on, from the files of all ranks.

        Raises CheckpointError if rows are missing or have another shape.
        """
        if not len(rows.tensor):
            return
        found = slice_rows(self.tensors, name, rows.start, rows.start + len(rows.tensor))
        if found.shape != rows.tensor.shape:
            raise CheckpointError(
                f"the rows of {name} in {self.folder} have shape {list(found.shape[1:])}, not "
                f"{list(rows.tensor.shape[1:])}: resume with the options that wrote the checkpoint"
            )
        rows.tensor.copy_(found)


@dataclass(frozen=True, slots=True)
class CheckpointDir:
    """Checkpoints of one run. `report` is called on rank 0 with a message about each damaged checkpoint."""

    path: Path
    report: Callable[[str], None]

    def folders(self) -> list[Path]:
        """Lists the checkpoints, newest first, without verifying them."""
        found = self.path.glob("step-*") if self.path.is_dir() else []
        return sorted((p for p in found if is_checkpoint(p.name)), key=step_of, reverse=True)

    def load(self, step: int | None = None) -> Checkpoint | None:
        """Loads a checkpoint as `load_on_all` does, in a single process."""
        return self.load_on_all(Comm(0, 1, 0, torch.device("cpu")), step)

    def load_on_all(self, comm: Comm, step: int | None = None) -> Checkpoint | None:
        """Loads the newest checkpoint whose hashes match, or that of `step`. Returns None if the run has no checkpoint.

        Collective: each rank verifies a share of the files, and all return the same checkpoint. A damaged checkpoint is
        reported, renamed to `*.corrupt` and skipped. Raises CheckpointError if all are damaged, or that of `step` is.
        """
        wanted = None if step is None else [self.path / step_folder(step)]
        folders: list[Path] = comm.broadcast_object(wanted or (self.folders() if comm.is_main else None))
        for folder in folders:
            damage = next(filter(None, comm.gather_objects(find_damage(folder, comm.rank, comm.world))), None)
            if damage is None:
                return read(folder)
            if step is not None:
                steps = ", ".join(str(step_of(p)) for p in self.folders()) or "none"
                raise CheckpointError(f"checkpoint {folder} cannot be used: {damage}; available steps: {steps}")
            comm.run_on_main(lambda folder=folder, damage=damage: self.mark_corrupt(folder, damage))  # type: ignore[misc]
        if folders:
            raise CheckpointError(f"all checkpoints in {self.path} are damaged: restore one, or start a new run")
        return None

    def mark_corrupt(self, folder: Path, damage: str) -> None:
        """Reports a damaged checkpoint and renames it if the file system permits."""
        self.report(f"checkpoint {folder} is damaged ({damage}): falling back to the previous checkpoint")
        names = (f"{folder.name}.corrupt{number or ''}" for number in range(1000))
        with suppress(OSError, StopIteration):
            folder.rename(next(p for p in map(folder.with_name, names) if not p.exists()))

    def remove_incomplete(self) -> None:
        """Removes the remains of interrupted saves. Only the process that writes to the folder may call it."""
        for temporary in self.path.glob("tmp.step-*") if self.path.is_dir() else ():
            final = self.path / temporary.name.split(".")[1]
            if temporary.suffix == ".old" and not final.exists():  # commit() was interrupted between its two renames
                temporary.rename(final)
            else:
                shutil.rmtree(temporary)

    def remove(self, folder: Path) -> None:
        """Deletes a checkpoint. A rename first ensures that no partial checkpoint is visible."""
        shutil.rmtree(folder.rename(folder.with_name(f"tmp.{folder.name}.gone")))


class DamagedCheckpoint(CheckpointError):
    """A checkpoint has missing or changed files. An older checkpoint can replace it."""


def read_manifest(content: bytes) -> dict[str, str]:
    """Parses a manifest. Returns the SHA-256 of each file by name. Raises DamagedCheckpoint."""
    try:
        manifest: dict[str, str] = dict(json.loads(content))
        # A path could point outside the folder.
        foreign = [name for name in manifest if not re.fullmatch(r"\w[\w.-]*", name)]
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read: {error}") from None
    if foreign:
        raise DamagedCheckpoint(f"{MANIFEST} names {foreign[0]!r}, which is not a file of the checkpoint")
    return manifest


def find_damage(folder: Path, rank: int = 0, world: int = 1) -> str | None:
    """Returns why a checkpoint cannot be used, or None. Each of `world` ranks hashes a share of the files."""
    if not folder.is_dir():
        return "it does not exist"
    try:
        manifest = read_manifest((folder / MANIFEST).read_bytes())
        for name in sorted(manifest.keys() | set(_REQUIRED))[rank::world]:
            # A link may point outside the folder, and a pipe never ends.
            if not stat.S_ISREG((folder / name).lstat().st_mode):
                return f"{name} is not a regular file"
            if sha256(folder / name) != manifest[name]:
                return f"the hash of {name} does not match"
    except DamagedCheckpoint as damage:
        return str(damage)
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except OSError as error:
        return f"{Path(str(error.filename)).name} cannot be read: {error.strerror}"
    except KeyError as error:
        return f"{MANIFEST} does not name {error.args[0]}"
    return None


def read(folder: Path) -> Checkpoint:
    """Opens a verified checkpoint. Reads only the files that its manifest names.

    Raises CheckpointError if a file with a matching hash does not have the content of a checkpoint.
    """
    files = read_manifest((folder / MANIFEST).read_bytes())
    tensors = CheckpointTensors.open(folder, sorted(name for name in files if name.endswith(".safetensors")))
    try:
        saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return Checkpoint(step_of(folder), tensors, saved["state"], folder, saved["keep"], saved["score"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / STATE} is not the state of a checkpoint ({type(error).__name__}): restore it"
        ) from error


# ----------------------------------------------------------------------------------------------------- writing


def commit(temporary: Path, final: Path, hashes: dict[str, str]) -> None:
    """Commits a folder whose files are on disk: writes the manifest, then renames the folder. Raises OSError."""
    write_file(temporary / MANIFEST, [json.dumps(dict(sorted(hashes.items())), indent=1).encode()])
    sync(temporary)
    old = temporary.with_suffix(".old")
    if final.exists():  # a resumed run has repeated the step
        final.rename(old)
    temporary.rename(final)
    sync(final.parent)
    if old.exists():
        shutil.rmtree(old)


def write_file(path: Path, contents: list[bytes | memoryview]) -> str:
    """Writes and syncs a new file. Returns its SHA-256. Releases the GIL while hashing and writing.

    Each chunk is hashed just before it is written, so that it is in the CPU cache and the file is not read again.
    """
    digest = hashlib.sha256()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for content in contents:
            view = memoryview(content)
            for at in range(0, len(view), _WRITE_BYTES):
                rest = view[at : at + _WRITE_BYTES]
                digest.update(rest)
                while rest:
                    rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flushes a file or folder to disk (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
