"""Checkpoint format on disk: reading, verification and atomic commit.

    checkpoints/step-00000010/tensors.safetensors                tensors that are replicated over the ranks
                              shard.00002-of-00008.safetensors   a rank's rows of tensors that are sharded over them
                              state.json                         step, counters, data position, configuration
                              MANIFEST.json                      SHA-256 of the other files; written last

A checkpoint is written to `tmp.*`, synced, then renamed. The newest folder whose files match its manifest is the latest
checkpoint. A tensor has the same name in all files, and is read in full or by rows, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clipx.checkpoint.records import MANIFEST, STATE, TENSORS, DamagedCheckpoint, read_manifest, read_state
from clipx.checkpoint.resume import is_checkpoint, step_folder, step_of
from clipx.checkpoint.tensors import CheckpointTensors, RankRows, slice_rows
from clipx.config.lazy_torch import torch
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError
from clipx.escape import announce
from clipx.storage.local import sync
from clipx.storage.safe_json import read_regular

_REQUIRED = (TENSORS, STATE)
_WRITE_BYTES = 4 << 20  # hashed while they are in the processor's cache

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State of a run: tensors by name, and plain values.

    `clipx.trainer.saved_run.open_run(RUN).load()` returns the newest one of a run.

    Args:
        step: number of finished optimizer steps.
        tensors: weights, state of the optimizer and of the objective, and random generators, by name. Those of a folder
            are read when they are asked for.
        state: samples seen, position in the data, configuration, and counters.
        folder: folder it was read from. None: it is not read from one.
        keep: whether the retention policy never deletes it.
        score: value of the metric `checkpoint.best`, higher is better. None: it has none.

    Shape:
        - `tensors`: the shape of the parameter, also of one whose rows were sharded over the ranks.
        - `rows.tensor` of `read_rows`: `[n, …]`, the n rows of a tensor from `rows.start` on.

    Raises:
        CheckpointError: the rows that `read_rows` or `row_length` reads are missing, or have another shape.
        FrozenInstanceError: a field is assigned. Use `dataclasses.replace`.

    Example:
        The checkpoint at the end of a run of one step:

            >>> from clipx import Trainer, compose
            >>> from clipx.trainer.saved_run import open_run
            >>> options = ["model=tiny", "data=digits", "data.workers=0", "duration=1st", "schedule.warmup=0st"]
            >>> spec = compose(*options, "data.batch_size=32", "evaluate=false", "report=false", "run_dir=saved")
            >>> _ = Trainer(spec).fit()
            run      tiny-digits-...
            >>> checkpoint = open_run("saved").load()
            >>> checkpoint.step, checkpoint.state["samples_seen"], checkpoint.folder.name
            (1, 32, 'step-00000001')
            >>> checkpoint.tensors["model/image.projection.weight"].shape[0]
            128
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    state: dict[str, Any]
    folder: Path | None = None
    keep: bool = False  # never deleted by the retention policy
    score: float | None = None  # higher is better

    def sharded_names(self) -> set[str]:
        """Returns the names of the tensors that were saved by rows."""
        return self.tensors.sharded_names() if isinstance(self.tensors, CheckpointTensors) else set()

    def row_length(self, name: str) -> int:
        """Returns the length of a row of a matrix. Raises CheckpointError if there is no row."""
        return int(slice_rows(self.tensors, name, 0, 1).shape[-1])

    def read_rows(self, name: str, rows: RankRows) -> None:
        """Fills `rows.tensor` with the rows of a tensor from index `rows.start` on, from the files of all ranks.

        Raises CheckpointError if rows are missing or have another shape.
        """
        if not len(rows.tensor):
            return
        found = slice_rows(self.tensors, name, rows.start, rows.start + len(rows.tensor))
        if (saved := list(found.shape[1:])) != (own := list(rows.tensor.shape[1:])):
            raise CheckpointError(
                f"the rows of {name} in {self.folder} have shape {saved}, not {own}: resume with the options that "
                "wrote the checkpoint"
            )
        rows.tensor.copy_(found)


@dataclass(frozen=True, slots=True)
class CheckpointDir:
    """Checkpoints of one run. `report` is called on rank 0 with a message about each damaged checkpoint."""

    path: Path
    report: Callable[[str], None]

    def folders(self) -> list[Path]:
        """Lists the checkpoints, newest first, without verifying them. Raises CheckpointError if that is impossible."""
        try:
            names = [p.name for p in self.path.iterdir()] if os.path.lexists(self.path) else []
        except OSError as error:  # of a link to a disk that is not mounted, for example: a run must not start anew
            raise CheckpointError(
                f"{self.path} cannot be listed ({error.strerror}): mount its disk, correct its permissions, or move it "
                "away to start without its checkpoints"
            ) from None
        return sorted((self.path / name for name in names if is_checkpoint(name)), key=step_of, reverse=True)

    def load(self, step: int | None = None) -> Checkpoint | None:
        """Loads a checkpoint as `load_on_all` does, in a single process."""
        return self.load_on_all(Comm(0, 1, 0, torch.device("cpu")), step)

    def load_on_all(self, comm: Comm, step: int | None = None) -> Checkpoint | None:
        """Loads the newest intact checkpoint, or that of `step`. Returns None if the run has no checkpoint.

        Collective: each rank hashes a share of the files. A damaged checkpoint is reported, renamed to `*.corrupt` and
        skipped. One that the disk did not read keeps its name, and so do all where none is intact: a later start would
        begin anew. Raises CheckpointError if all are damaged, or that of `step` is.
        """
        folders: list[Path] = (
            comm.run_on_main(self.folders) if step is None else [comm.broadcast_object(self.path / step_folder(step))]
        )
        damaged: dict[Path, str] = {}
        for folder in folders:
            with suppress(OSError):  # as its verification says
                size = sum(file.stat().st_size for file in folder.iterdir()) if comm.is_main else 0
                announce(f"reading {folder}", size)
            found = _verified(folder, comm.rank, comm.world)
            own = found if isinstance(found, str) else None
            damage = next(filter(None, comm.gather_objects(own)), None)
            if damage is None and isinstance(found, Checkpoint):
                for one in damaged.items():
                    comm.run_on_main(partial(self.mark_corrupt, *one))
                return found
            damaged[folder] = damage or ""
            if step is not None:
                steps = ", ".join(str(step_of(p)) for p in self.folders()) or "none"
                raise CheckpointError(f"checkpoint {folder} cannot be used: {damage}; available steps: {steps}")
        if damaged:
            newest, damage = next(iter(damaged.items()))
            raise CheckpointError(
                f"all checkpoints in {self.path} are damaged ({newest.name}: {damage}): restore one, or start a new run"
            )
        return None

    def mark_corrupt(self, folder: Path, damage: str) -> None:
        """Reports a damaged checkpoint and renames it if the file system permits, unless another start may read it."""
        self.report(f"checkpoint {folder} is damaged ({damage}): falling back to the previous checkpoint")
        if isinstance(damage, Unread):
            return
        with suppress(OSError):
            folder.rename(unused_name(folder, "corrupt"))

    def remove_incomplete(self) -> None:
        """Removes the remains of interrupted saves. Only the process that writes to the folder may call it."""
        for temporary in self.path.glob("tmp.step-*") if self.path.is_dir() else ():
            final = self.path / temporary.name.split(".")[1]
            try:
                if temporary.suffix == ".old" and is_checkpoint(final.name) and not os.path.lexists(final):
                    temporary.rename(final)  # commit() was interrupted between its two renames
                else:
                    discard(temporary)
            except OSError as error:
                log.warning("%s, of an interrupted save, cannot be removed: %s", temporary, error.strerror)

    def remove(self, folder: Path) -> None:
        """Deletes a checkpoint. A rename first ensures that no partial checkpoint is visible."""
        discard(folder.rename(folder.with_name(f"tmp.{folder.name}.gone")))


def unused_name(folder: Path, suffix: str) -> Path:
    """Returns the first path FOLDER.SUFFIX, FOLDER.SUFFIX1, FOLDER.SUFFIX2, … that does not exist."""
    names = (folder.with_name(f"{folder.name}.{suffix}{number or ''}") for number in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


class Unread(str):
    """Reason not to use a checkpoint that may be intact: the disk did not read it."""


def find_damage(folder: Path, step: int | None = None) -> str | None:
    """Returns why a checkpoint cannot be used, or None. `step`: its step, if the folder has another name."""
    found = _verified(folder, step=step)
    return found if isinstance(found, str) else None


def newest_config(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """Returns the newest checkpoint in the folder whose state is intact and holds the configuration, and that, or None.

    Raises CheckpointError if the folder cannot be read.
    """
    for folder in CheckpointDir(path, log.warning).folders():
        with suppress(OSError, DamagedCheckpoint):
            for name in (MANIFEST, STATE):
                _require_file(folder / name)
            intact = sha256(folder / STATE) == read_manifest(read_regular(folder / MANIFEST)).get(STATE)
            if intact and (config := read_state(read_regular(folder / STATE)).state.get("config")):
                return folder, config
    return None


def _verified(folder: Path, rank: int = 0, world: int = 1, step: int | None = None) -> Checkpoint | str:
    """Returns a checkpoint, or why it cannot be used. Each of `world` ranks hashes a share of the files."""
    try:
        return _read(folder, step_of(folder) if step is None else step, rank, world)
    except (DamagedCheckpoint, OSError) as error:
        return why_unusable(error)


def why_unusable(error: DamagedCheckpoint | OSError) -> str:
    """Returns why a checkpoint cannot be used whose reading raised this error."""
    if not isinstance(error, OSError):
        return str(error)
    name = Path(str(error.filename)).name if error.filename else "a file"  # `read` does not know it
    if isinstance(error, FileNotFoundError):
        return f"{name} is missing"
    return Unread(f"{name} cannot be read: {error.strerror}")


def _read(folder: Path, step: int, rank: int, world: int) -> Checkpoint:
    """Opens a checkpoint. Reads only the files that its manifest names. Raises DamagedCheckpoint and OSError."""
    if not folder.is_dir():
        raise DamagedCheckpoint("it is not a folder" if os.path.lexists(folder) else "it does not exist")
    _require_file(folder / MANIFEST)
    manifest = read_manifest(read_regular(folder / MANIFEST))
    names = sorted(manifest.keys() | set(_REQUIRED))
    for name in names:
        _require_file(folder / name)
        if name not in manifest:
            raise DamagedCheckpoint(f"{MANIFEST} does not name {name}")
    for name in names[rank::world]:
        if sha256(folder / name) != manifest[name]:
            raise DamagedCheckpoint(f"the hash of {name} does not match")
    file = read_state(read_regular(folder / STATE))
    recorded = file.step
    if recorded is None:  # of an earlier version: a link leads to a folder that is named after its step
        named = folder.resolve()
        recorded = step_of(named) if is_checkpoint(named.name) else step
    if recorded != step:
        raise DamagedCheckpoint(f"it is of step {recorded}")
    tensors = CheckpointTensors.open(folder, [name for name in names if name.endswith(".safetensors")])
    return Checkpoint(step, tensors, file.state, folder, file.keep, file.score)


def _require_file(path: Path) -> None:
    """Raises DamagedCheckpoint for a link, which may lead outside the folder, and a named pipe, which never ends."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise DamagedCheckpoint(f"{path.name} is not a regular file")


# ----------------------------------------------------------------------------------------------------- writing


def commit(temporary: Path, final: Path, hashes: dict[str, str]) -> None:
    """Commits a folder whose files are on disk: writes the manifest, then renames the folder. Raises OSError."""
    write_file(temporary / MANIFEST, [json.dumps(dict(sorted(hashes.items())), indent=1).encode()])
    sync(temporary)
    old = temporary.with_suffix(".old")
    if os.path.lexists(final):  # a resumed run has repeated the step
        final.rename(old)
    temporary.rename(final)
    sync(final.parent)
    if os.path.lexists(old):
        discard(old)


def write_file(path: Path, contents: list[bytes | memoryview]) -> str:
    """Writes, hashes and syncs a new file. Returns its SHA-256. Releases the GIL meanwhile."""
    digest = hashlib.sha256()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for content in contents:
            view = memoryview(content)
            while view:
                written = os.write(fd, view[:_WRITE_BYTES])
                digest.update(view[:written])
                view = view[written:]
        os.fsync(fd)
    finally:
        os.close(fd)
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def discard(path: Path) -> None:
    """Removes a folder, a file or a link. What a link leads to remains. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
