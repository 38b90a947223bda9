"""Asynchronous saving: copies the state into staging memory, which a thread writes while training continues."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clipx.checkpoint.format import CheckpointDir, commit, find_damage, why_unusable, write_file
from clipx.checkpoint.records import STATE, TENSORS, CheckpointInfo, DamagedCheckpoint, steps_to_keep
from clipx.checkpoint.resume import step_folder, step_of
from clipx.checkpoint.staging import StagingBuffer, copies_from, split_sharded
from clipx.config.lazy_torch import dist, torch
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError
from clipx.storage.safe_json import read_regular

if TYPE_CHECKING:
    from clipx.checkpoint.spec import CheckpointSpec
    from clipx.checkpoint.tensors import RankRows

T = TypeVar("T")
log = logging.getLogger(__name__)

_GATHER_TIMEOUT = timedelta(minutes=30)  # time limit for the slowest rank to write its part
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, limit
_ADVICE = "free space, repair the disk, or choose another run_dir"


@dataclass(frozen=True, slots=True)
class _FailedSave:
    """Reason of a failed write on a rank."""

    reason: str
    disk_full: bool = False


@dataclass(slots=True)
class _Save:
    """Checkpoint that is staged but not yet on disk."""

    info: CheckpointInfo
    started: float
    state: bytes | None = None  # on rank 0
    sharded: bool = False  # this rank has rows to write
    failure: _FailedSave | None = None  # of staging
    sources: list[Any] = field(default_factory=list)  # tensors that copies read, which must not be freed before
    stalls: dict[str, float] = field(default_factory=dict)  # seconds that training waited


class AsyncWriter:
    """Saves one run's checkpoints under `path`, on a file system that all ranks share. All ranks use it alike.

    Rank 0's writer thread calls `event(kind, **facts)` for a checkpoint that was saved, failed or is damaged;
    `is_uploaded(folder)`: a checkpoint for which it is False is not deleted; `on_commit(folder)` for each new one.
    """

    def __init__(
        self,
        path: Path,
        spec: CheckpointSpec,
        comm: Comm,
        event: Callable[..., None],
        *,
        is_uploaded: Callable[[Path], bool] | None = None,
        on_commit: Callable[[Path], None] | None = None,
    ) -> None:
        self._spec, self._comm, self._event = spec, comm, event
        self._is_uploaded, self._on_commit = is_uploaded, on_commit
        self._dir = CheckpointDir(path, self._report_damage)
        self._copies = copies_from(comm.device)
        self._replicated, self._sharded = StagingBuffer(self._copies), StagingBuffer(self._copies)
        # A new thread is on device 0, where locking memory would make a context of this process, too.
        bind = None if comm.device.type == "cpu" else partial(torch.accelerator.set_device_index, comm.device)
        self._threads = ThreadPoolExecutor(1, "checkpoint", bind)
        # A separate process group: training issues collectives at the same time, whose order must not change.
        self._group: Any = dist.new_group(backend="gloo", timeout=_GATHER_TIMEOUT) if comm.world > 1 else None
        self._pending: Future[_FailedSave | None] | None = None
        self._reserved: Future[None] | None = None
        self._failures = 0  # consecutive
        self._failure: _FailedSave | None = None  # of the last save
        self._infos: dict[Path, CheckpointInfo] = {}  # of checkpoints that this process wrote or verified
        self._token: int = comm.broadcast_object(os.getpid())
        if comm.is_main:
            with suppress(OSError):  # then the next save fails as well and reports it
                self._dir.remove_incomplete()
        comm.barrier()

    def reserve(self, tensors: Mapping[str, torch.Tensor | RankRows]) -> None:
        """Allocates the staging memory in the background. Call it when the optimizer has its state."""
        replicated, sharded = split_sharded(tensors, self._comm.is_main)

        def allocate() -> None:
            with suppress(OSError, MemoryError, RuntimeError):  # then the next save fails as well and reports it
                self._replicated.reserve(sum(x.nbytes for x in replicated.values()))
                self._sharded.reserve(sum(x.tensor.nbytes for x in sharded.values()))

        self._reserved = self._threads.submit(allocate)

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor | RankRows],
        state: dict[str, Any],
        *,
        keep: bool = False,
        score: float | None = None,
        until_update: Collection[str] = (),
    ) -> None:
        """Stages a checkpoint, after the previous save. The state may change when it returns, except tensors that
        `until_update` names: those may change after `hold_updates`. Collective.

        Saves rank 0's tensors, and each rank's rows of `RankRows` and of DTensors that are sharded by rows. `state`:
        plain values of rank 0. `keep`: never delete this checkpoint, as the one with the highest `score`.

        A failed save is reported and the run continues; after `max_failures` failures in a row the next call, with
        `background=False` this one, raises CheckpointError on all ranks.
        """
        started = time.perf_counter()
        self._finish_previous()
        waited = time.perf_counter()
        score = score if score is not None and math.isfinite(score) else None
        save = _Save(CheckpointInfo(step, keep, score), started)
        if self._comm.is_main:
            save.state = json.dumps({"step": step, "keep": keep, "score": score, "state": state}).encode()
        self._stage(save, tensors, until_update)
        save.stalls = {"waited_s": waited - started, "staged_s": time.perf_counter() - waited}
        self._pending = self._threads.submit(self._write, save)
        if not self._spec.background:
            self._finish_previous()

    def hold_updates(self) -> None:
        """Makes work that is queued on the device from now on start after the copies of the last `save`."""
        self._copies.hold_updates()

    def wait(self) -> None:
        """Waits until all saves are on disk. Raises CheckpointError if the last save failed. Collective."""
        self._finish_previous()
        if self._failure is not None:
            raise CheckpointError(f"the last checkpoint could not be written ({self._failure.reason}): {_ADVICE}")

    def close(self) -> None:
        """Waits for a save in progress and ignores its result."""
        self._threads.shutdown()
        self._pending = None
        self._replicated.release()
        self._sharded.release()

    # --------------------------------------------------------------------------------------- the training thread

    def _finish_previous(self) -> None:
        """Waits for the previous save and counts failures, which are the same on all ranks."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._failure = pending.result()
        self._failures = self._failures + 1 if self._failure else 0
        if self._failure is not None and self._failures >= self._spec.max_failures:
            raise CheckpointError(
                f"checkpoint.max_failures={self._spec.max_failures} checkpoints in a row could not be written "
                f"({self._failure.reason}): {_ADVICE}"
            )

    def _stage(
        self, save: _Save, tensors: Mapping[str, torch.Tensor | RankRows], until_update: Collection[str]
    ) -> None:
        if self._reserved is not None:
            self._reserved.result()
            self._reserved = None
        replicated, sharded = split_sharded(tensors, self._comm.is_main)
        save.sharded = bool(sharded)
        save.sources = [*replicated.values(), *sharded.values()]
        try:
            if self._comm.is_main:
                self._replicated.fill(replicated, until_update)
            if sharded:
                self._sharded.fill(sharded, until_update)
        except (OSError, MemoryError, RuntimeError) as error:  # out of memory; _write reports it to the other ranks
            save.failure = self._not_copied(error)

    # ----------------------------------------------------------------------------------------- the writer thread

    def _write(self, save: _Save) -> _FailedSave | None:
        """Writes a checkpoint and retries once after pruning on a full disk. Returns the same on all ranks."""
        try:
            self._copies.synchronize()
        except RuntimeError as error:
            save.failure = self._not_copied(error)
        save.sources = []
        for attempt in (1, 2):
            failure, size = self._attempt(save)
            if self._comm.is_main:
                self._report(save, failure, size)
            if failure is None:
                break
            retry = failure.disk_full and attempt == 1
            if retry and self._comm.is_main:
                self.prune(size)
            self._all_gather(None)  # barrier: rank 0 has removed the partial files and pruned
            if not retry:
                break
        return failure

    def _attempt(self, save: _Save) -> tuple[_FailedSave | None, int]:
        """Writes and commits a checkpoint. Returns the failure, if any, and the bytes of all ranks together."""
        temporary = self._temporary(save.info.step)
        size = len(save.state or b"") + (self._replicated.size if self._comm.is_main else 0)
        size += self._sharded.size if save.sharded else 0
        result: Any = save.failure or self._catch(lambda: self._write_files(temporary, save))
        results = self._all_gather((result, size))
        total = sum(size for _, size in results)
        hashes: dict[str, str] = {}
        for result, _ in results:
            if isinstance(result, _FailedSave):
                return result, total
            hashes |= result
        failure = self._catch(lambda: self._commit(temporary, save.info, hashes)) if self._comm.is_main else None
        return self._all_gather(failure)[0], total

    def _write_files(self, folder: Path, save: _Save) -> dict[str, str]:
        """Writes this rank's files. Returns their hashes. Raises OSError."""
        folder.parent.mkdir(exist_ok=True)  # not its parents: a run directory that was removed must not come back
        folder.mkdir(exist_ok=True)
        hashes = {}
        if save.sharded:
            name = f"shard.{self._comm.rank + 1:05d}-of-{self._comm.world:05d}.safetensors"
            hashes[name] = self._sharded.write(folder / name)
        if save.state is not None:
            hashes[TENSORS] = self._replicated.write(folder / TENSORS)
            hashes[STATE] = write_file(folder / STATE, [save.state])
        return hashes

    def _commit(self, temporary: Path, info: CheckpointInfo, hashes: dict[str, str]) -> None:
        for name in hashes:
            if not (temporary / name).is_file():
                raise FileNotFoundError(
                    f"{name} is not visible on rank 0: put run_dir on a file system that all nodes share"
                )
        final = self._dir.path / step_folder(info.step)
        commit(temporary, final, hashes)
        self._infos[final] = info

    def _report(self, save: _Save, failure: _FailedSave | None, size: int) -> None:
        """Reports an attempt on rank 0 and removes the files of a failed one."""
        step = save.info.step
        if failure is None:
            seconds = time.perf_counter() - save.started
            self._event("checkpoint_saved", step=step, bytes=size, seconds=seconds, **save.stalls)
            if self._on_commit is not None:
                self._on_commit(self._dir.path / step_folder(step))
            self.prune()
            return
        shutil.rmtree(self._temporary(step), ignore_errors=True)
        free = self._free()
        needed = f"it needs {size:,} bytes, {free:,} are free"
        log.warning("the checkpoint of step %d could not be written (%s): %s", step, failure.reason, needed)
        self._event("checkpoint_failed", step=step, message=failure.reason, needed_bytes=size, free_bytes=free)

    def _temporary(self, step: int) -> Path:
        return self._dir.path / f"tmp.{step_folder(step)}.{self._token}"

    def _all_gather(self, value: T) -> list[T]:
        """Gathers every rank's value, in rank order. Raises RuntimeError if a rank has died, as any collective."""
        if self._group is None:
            return [value]
        out: list[Any] = [None] * self._comm.world
        dist.all_gather_object(out, value, self._group)
        return out

    def _catch(self, call: Callable[[], T]) -> T | _FailedSave:
        try:
            return call()
        except OSError as error:
            return self._failed(str(error), error.errno in _DISK_FULL)

    def _not_copied(self, error: Exception) -> _FailedSave:
        return self._failed(f"cannot be copied to staging memory: {error or 'out of memory'}")

    def _failed(self, reason: str, disk_full: bool = False) -> _FailedSave:
        return _FailedSave(f"rank {self._comm.rank}: {reason}" if self._comm.world > 1 else reason, disk_full)

    # ------------------------------------------------------------------------------------------------ retention

    def prune(self, needed: int | None = None) -> None:
        """Deletes the checkpoints that the retention policy does not keep, on rank 0.

        With `needed`, keeps at most the two newest, and deletes the oldest until that many bytes are free.
        """
        keep_last = self._spec.keep_last if needed is None else min(2, self._spec.keep_last)
        try:
            intact = self._intact(keep_last)
        except CheckpointError as error:
            log.warning("no old checkpoint is removed: %s", error)
            return
        keep = steps_to_keep(list(intact.values()), keep_last, self._spec.delete_previous)
        for folder in sorted((f for f, info in intact.items() if info.step not in keep), key=step_of):
            if needed is not None and self._free() >= needed:
                return
            try:
                self._dir.remove(folder)
            except OSError as error:
                log.warning("the checkpoint %s cannot be removed: %s", folder, error)
            self._infos.pop(folder, None)

    def _intact(self, keep_last: int) -> dict[Path, CheckpointInfo]:
        """Returns all checkpoints, newest first, except damaged ones, which do not count towards the number to keep.

        Verifies the newest `keep_last` checkpoints of earlier processes once.
        """
        intact: dict[Path, CheckpointInfo] = {}
        for folder in self._dir.folders():
            if folder not in self._infos:
                damage = find_damage(folder) if len(intact) < keep_last else None
                try:
                    info = CheckpointInfo.read(step_of(folder), read_regular(folder / STATE))
                except (DamagedCheckpoint, OSError) as error:
                    damage = damage or why_unusable(error)
                if damage is not None:
                    self._dir.mark_corrupt(folder, damage)
                    continue
                self._infos[folder] = info
            uploaded = None if self._is_uploaded is None else self._is_uploaded(folder)
            intact[folder] = replace(self._infos[folder], uploaded=uploaded)
        return intact

    def _free(self) -> int:
        with suppress(OSError):
            return shutil.disk_usage(self._dir.path).free
        return 0

    def _report_damage(self, message: str) -> None:
        log.warning(message)
        self._event("checkpoint_damaged", message=message)
