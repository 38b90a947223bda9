"""The format of a checkpoint, and how it is read back.

    checkpoints/step-00000010/tensors.safetensors                what every rank has alike, whole
                              shard.00002-of-00008.safetensors   a rank's part of what is spread over the ranks
                              state.json                         counters, data position, configuration
                              MANIFEST.json                      SHA-256 of them all; written last

Written to `tmp.*`, synced, then renamed. The newest folder whose manifest holds is the latest checkpoint.

A tensor has one name wherever it lies, and is read whole or by rows, on any number of ranks. torch's distributed
checkpoints are neither written nor read: loading one unpickles its `.metadata`, which runs whatever it was made to run,
and a flipped bit in one loads as if it were right.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipx.checkpoint.resume import is_checkpoint, step_folder, step_of
from clipx.config.lazy_torch import torch
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "MANIFEST.json"
ROWS = "rows"  # in a shard's metadata: by name, the number of the first row it holds
_REQUIRED = (TENSORS, STATE)  # in every checkpoint
_CHUNK = 16 << 20  # bytes: of 1 MiB, writing took twice as long


@dataclass(frozen=True, slots=True)
class RankRows:
    """A rank's part of a tensor that is spread over the ranks: the rows from number `start` on."""

    tensor: torch.Tensor
    start: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [start, stop) of a tensor in a file; where it is not saved by rows, all of it."""

    start: int
    stop: int
    spread: bool
    file: Any  # an open safetensors file


class CheckpointTensors(Mapping[str, "torch.Tensor"]):
    """The tensors of a checkpoint by name, read when asked for; whole, whichever ranks wrote their rows."""

    def __init__(self, folder: Path, pieces: dict[str, list[_Piece]], prefix: str = "") -> None:
        self._folder, self._pieces, self._prefix = folder, pieces, prefix

    @classmethod
    def open(cls, folder: Path, files: list[str]) -> CheckpointTensors:
        """Reads the headers. Raises CheckpointError where a file is not what it should be."""
        from safetensors import SafetensorError

        pieces: dict[str, list[_Piece]] = {}
        for name in files:
            try:
                file = _opened(folder / name)
                starts = json.loads((file.metadata() or {}).get(ROWS, "{}"))
                for key in file.keys():  # noqa: SIM118  # it is no mapping
                    shape, start = file.get_slice(key).get_shape(), int(starts.get(key, 0))
                    stop = start + shape[0] if shape else 0
                    pieces.setdefault(key, []).append(_Piece(start, stop, key in starts, file))
            except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{folder / name} is not a file of tensors ({error}): restore it") from error
        for parts in pieces.values():
            parts.sort(key=lambda piece: piece.start)
        return cls(folder, pieces)

    def __getitem__(self, name: str) -> torch.Tensor:
        key = self._prefix + name
        parts = self._pieces[key]
        if parts[0].spread:
            return self.rows(name, 0, parts[-1].stop)
        tensor: torch.Tensor = parts[0].file.get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._pieces if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._prefix + name in self._pieces

    def shape(self, name: str) -> list[int]:
        """Of the whole tensor, which is not read."""
        parts = self._pieces[self._prefix + name]
        shape: list[int] = list(parts[0].file.get_slice(self._prefix + name).get_shape())
        return [parts[-1].stop, *shape[1:]] if shape else shape

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The rows [start, stop) of a tensor. Raises CheckpointError where some are missing."""
        key, at, found = self._prefix + name, start, []
        for piece in self._pieces[key]:
            if piece.start <= at < min(piece.stop, stop):
                end = min(piece.stop, stop)
                found.append(piece.file.get_slice(key)[at - piece.start : end - piece.start])
                at = end
        if at < stop:
            raise CheckpointError(
                f"the checkpoint {self._folder} lacks rows {at} to {stop} of {key}: it is of another data set, or a "
                "file is gone; restore it, or start a new run"
            )
        if not found:  # none were asked for
            return self[name][:0]
        return found[0] if len(found) == 1 else torch.cat(found)

    def sharded_names(self) -> set[str]:
        """The names of those that were saved by rows."""
        return {name for name in self if any(piece.spread for piece in self._pieces[self._prefix + name])}

    def select_prefix(self, prefix: str) -> CheckpointTensors:
        """The tensors under a prefix, without it."""
        return CheckpointTensors(self._folder, self._pieces, f"{self._prefix}{prefix}/")


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, "pt")


def slice_rows(tensors: Mapping[str, torch.Tensor], name: str, start: int, stop: int) -> torch.Tensor:
    """The rows [start, stop) of a tensor; of a stored one no others are read."""
    return tensors.rows(name, start, stop) if isinstance(tensors, CheckpointTensors) else tensors[name][start:stop]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run needs to go on: tensors by name, and plain values. `folder` is where it was read from."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    state: dict[str, Any]
    folder: Path | None = None
    keep: bool = False  # stays for ever
    score: float | None = None  # the higher, the better

    def sharded_names(self) -> set[str]:
        """The names of what was saved by rows."""
        return self.tensors.sharded_names() if isinstance(self.tensors, CheckpointTensors) else set()

    def read_rows(self, name: str, rows: RankRows) -> None:
        """Fills `rows.tensor` with the rows of a tensor from number `rows.start` on, whichever ranks wrote them.

        Raises CheckpointError where some are missing, or of another shape.
        """
        if not len(rows.tensor):
            return
        found = slice_rows(self.tensors, name, rows.start, rows.start + len(rows.tensor))
        if found.shape != rows.tensor.shape:
            raise CheckpointError(
                f"the rows of {name} in {self.folder} are of shape {list(found.shape[1:])}, not "
                f"{list(rows.tensor.shape[1:])}: resume with the options that wrote it"
            )
        rows.tensor.copy_(found)


@dataclass(frozen=True, slots=True)
class CheckpointDir:
    """The checkpoints of one run. `report` is called with a line on each damaged one, on rank 0."""

    path: Path
    report: Callable[[str], None]
    alone: Comm = field(default_factory=lambda: Comm(0, 1, 0, torch.device("cpu")), init=False, repr=False)

    def folders(self) -> list[Path]:
        """Checkpoints by step, the newest first; whether they are whole is not looked at."""
        found = self.path.glob("step-*") if self.path.is_dir() else []
        return sorted((p for p in found if is_checkpoint(p.name)), key=step_of, reverse=True)

    def load(self, step: int | None = None) -> Checkpoint | None:
        """`load_on_all` of a single process."""
        return self.load_on_all(self.alone, step)

    def load_on_all(self, comm: Comm, step: int | None = None) -> Checkpoint | None:
        """The newest checkpoint whose hashes hold, or that of `step`; None where there never was one. Collective: each
        rank verifies a share of the files, and all return the same checkpoint.

        A damaged one is told of, renamed to `*.corrupt` and passed over. Raises CheckpointError where all are damaged,
        or the one asked for is.
        """
        asked = None if step is None else [self.path / step_folder(step)]
        folders: list[Path] = comm.from_main(asked or (self.folders() if comm.is_main else None))
        for folder in folders:
            fault = next(filter(None, comm.gather_objects(find_damage(folder, comm.rank, comm.world))), None)
            if fault is None:
                return read(folder)
            if step is not None:
                raise CheckpointError(f"checkpoint {folder} cannot be used: {fault}; there are {self._steps()}")
            comm.on_main(lambda folder=folder, fault=fault: self.mark_corrupt(folder, fault))  # type: ignore[misc]
        if folders:
            raise CheckpointError(f"all checkpoints in {self.path} are damaged: restore one, or start a new run")
        return None

    def mark_corrupt(self, folder: Path, fault: str) -> None:
        """Tells of a damaged checkpoint, and renames it where that is allowed."""
        self.report(f"checkpoint {folder} is damaged ({fault}): falling back to the one before")
        names = (f"{folder.name}.corrupt{number or ''}" for number in range(1000))
        with suppress(OSError, StopIteration):
            folder.rename(next(p for p in map(folder.with_name, names) if not p.exists()))

    def remove_incomplete(self) -> None:
        """Removes what a save that was cut short left behind. Only the process that saves here may call it."""
        for stump in self.path.glob("tmp.step-*") if self.path.is_dir() else ():
            final = self.path / stump.name.split(".")[1]
            if stump.suffix == ".old" and not final.exists():  # cut short between its two renames: see replace()
                stump.rename(final)
            else:
                shutil.rmtree(stump)

    def remove(self, folder: Path) -> None:
        """Deletes a checkpoint: at any moment it is whole or not there."""
        gone = folder.rename(folder.with_name(f"tmp.{folder.name}.gone"))
        shutil.rmtree(gone)

    def _steps(self) -> str:
        return ", ".join(str(step_of(p)) for p in self.folders()) or "none"


def find_damage(folder: Path, rank: int = 0, world: int = 1) -> str | None:
    """Why a checkpoint cannot be trusted, or None. Of several ranks each hashes its share of the files."""
    if not folder.is_dir():
        return "it is not there"
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
        for name in manifest:
            if not re.fullmatch(r"\w[\w.-]*", name):
                return f"{MANIFEST} names {name}, which is no file of it"
        for name in sorted(manifest.keys() | set(_REQUIRED))[rank::world]:
            if not stat.S_ISREG((folder / name).lstat().st_mode):  # a link may lead out of it, a pipe never ends
                return f"{name} is no plain file"
            if sha256(folder / name) != manifest[name]:
                return f"the hash of {name} does not match"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except OSError as error:
        return f"{Path(str(error.filename)).name} cannot be read: {error.strerror}"
    except KeyError as error:
        return f"{MANIFEST} does not name {error.args[0]}"
    except (ValueError, TypeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None


def read(folder: Path) -> Checkpoint:
    """A checkpoint that was verified. Files that its manifest does not name are not looked at.

    Raises CheckpointError where a file is as it was written, and yet not what it should be.
    """
    files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    tensors = CheckpointTensors.open(folder, sorted(name for name in files if name.endswith(".safetensors")))
    try:
        saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return Checkpoint(step_of(folder), tensors, saved["state"], folder, saved["keep"], saved["score"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / STATE} is not a checkpoint's ({type(error).__name__}): restore it") from error


# ----------------------------------------------------------------------------------------------------- writing


def commit(temporary: Path, final: Path, hashes: dict[str, str]) -> None:
    """Makes a checkpoint of a folder whose files are on disk: the manifest, then the name. Raises OSError."""
    write_file(temporary / MANIFEST, [json.dumps(dict(sorted(hashes.items())), indent=1).encode()])
    sync(temporary)
    old = temporary.with_suffix(".old")
    if final.exists():  # a resumed run passes the same step again
        final.rename(old)
    temporary.rename(final)
    sync(final.parent)
    if old.exists():
        shutil.rmtree(old)


def write_file(path: Path, contents: list[bytes | memoryview]) -> str:
    """Writes a new file and waits until it is on disk. Returns its SHA-256. Holds Python's lock for no length of time.

    Hashing what was just read for writing is cheaper than reading the file again: it is in the cache.
    """
    digest = hashlib.sha256()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for content in contents:
            view = memoryview(content)
            for at in range(0, len(view), _CHUNK):
                rest = view[at : at + _CHUNK]
                digest.update(rest)
                while rest:
                    rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return digest.hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
