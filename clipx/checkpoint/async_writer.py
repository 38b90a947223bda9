"""Saving beside the training: the state is copied into memory that is kept for it, and a thread writes it out."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clipx.checkpoint.format import STATE, TENSORS, CheckpointDir, commit, find_damage, write_file
from clipx.checkpoint.resume import step_folder, step_of
from clipx.checkpoint.retention import CheckpointInfo, steps_to_keep
from clipx.checkpoint.staging import StagingBuffer, split_sharded
from clipx.config.lazy_torch import dist, torch
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError

if TYPE_CHECKING:
    from clipx.checkpoint.format import RankRows
    from clipx.checkpoint.spec import CheckpointSpec

T = TypeVar("T")
log = logging.getLogger(__name__)

_GATHER_TIMEOUT = timedelta(minutes=30)  # of a rank that has written its part, with the slowest one
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, limit


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a rank could not write."""

    reason: str
    full: bool  # whether room would help


@dataclass(slots=True)
class _Job:
    """A checkpoint between the moment it is of and the moment it is on disk."""

    step: int
    state: bytes | None  # on rank 0
    saved: CheckpointInfo
    spread: bool  # whether this rank has rows to write
    fault: _Fault | None
    began: float
    stalls: dict[str, float]  # s: what it has cost the training


class AsyncWriter:
    """Saves one run's checkpoints under `path`, which all ranks must see.

    Made, used and closed by all ranks at the same points. `event(kind, **facts)` is told on rank 0 of what was saved,
    failed or was damaged; `uploaded(folder)` says whether another copy is verified, without which nothing is deleted;
    `written(folder)` is called after each commit. All three are called on rank 0 alone, from the writer's thread.
    """

    def __init__(
        self,
        path: Path,
        spec: CheckpointSpec,
        comm: Comm,
        event: Callable[..., None],
        *,
        uploaded: Callable[[Path], bool] | None = None,
        written: Callable[[Path], None] | None = None,
    ) -> None:
        self._spec, self._comm, self._event = spec, comm, event
        self._uploaded, self._written = uploaded, written
        self._dir = CheckpointDir(path, self._tell)
        pinned = comm.device.type == "cuda"
        self._replicated, self._sharded = StagingBuffer(pinned), StagingBuffer(pinned)
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        # Of their own: the training's collectives go on meanwhile, in an order that nothing else may enter.
        self._group: Any = dist.new_group(backend="gloo", timeout=_GATHER_TIMEOUT) if comm.world > 1 else None
        self._pending: Future[_Fault | None] | None = None
        self._reserved: Future[None] | None = None
        self._failed = 0  # in a row
        self._fault: _Fault | None = None  # of the last save
        self._known: dict[Path, CheckpointInfo] = {}  # checkpoints that were written here, or verified
        self._token: int = comm.from_main(os.getpid())
        if comm.is_main:
            with suppress(OSError):  # where nothing can be removed, nothing can be written either, which is told
                self._dir.remove_incomplete()
        comm.barrier()

    def reserve(self, tensors: Mapping[str, torch.Tensor | RankRows]) -> None:
        """Makes the memory for such tensors beside the training, so that the first save costs no more than the next.

        To be called once the optimizer has its state: after the first step.
        """
        whole, spread = split_sharded(tensors, self._comm.is_main)
        sizes = sum(x.nbytes for x in whole.values()), sum(x.tensor.nbytes for x in spread.values())
        self._reserved = self._threads.submit(self._reserve, *sizes)

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor | RankRows],
        state: dict[str, Any],
        *,
        keep: bool = False,
        score: float | None = None,
    ) -> None:
        """Begins a checkpoint of this moment: when it returns, the state may change. Collective.

        Each rank gives its tensors: rank 0's are written, and each rank's rows of `RankRows` and of DTensors that are
        spread by rows. `state`, plain values, is rank 0's. `keep`: for ever. `score`: the highest is kept.

        A save that is still being written is waited for. One that fails is told of and the run goes on; after
        `max_failures` failures in a row the next call raises CheckpointError on all ranks. With `background=False` it
        returns when the checkpoint is on disk, or raises that at once.
        """
        began = time.perf_counter()
        self._settle()
        waited = time.perf_counter()
        job = _Job(step, None, CheckpointInfo(step, keep, score), False, None, began, {})
        if self._comm.is_main:
            job.state = json.dumps({"keep": keep, "score": score, "state": state}).encode()
        self._stage(job, tensors)
        job.stalls = {"waited_s": waited - began, "staged_s": time.perf_counter() - waited}
        self._pending = self._threads.submit(self._write, job)
        if not self._spec.background:
            self._settle()

    def wait(self) -> None:
        """Returns when everything is on disk. Raises CheckpointError, on all ranks, where the last save failed."""
        self._settle()
        if self._fault is not None:
            raise CheckpointError(f"the last checkpoint could not be written ({self._fault.reason}): {_FIX}")

    def close(self) -> None:
        """Lets a save that is under way end, whatever comes of it."""
        self._threads.shutdown()
        self._pending = None

    # --------------------------------------------------------------------------------- in the training's thread

    def _settle(self) -> None:
        """Waits for the save before, and acts on what came of it, which is the same on all ranks."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._fault = pending.result()
        self._failed = self._failed + 1 if self._fault else 0
        if self._fault is not None and self._failed >= self._spec.max_failures:
            raise CheckpointError(
                f"checkpoint.max_failures={self._spec.max_failures} checkpoints in a row could not be written "
                f"({self._fault.reason}): {_FIX}"
            )

    def _stage(self, job: _Job, tensors: Mapping[str, torch.Tensor | RankRows]) -> None:
        if self._reserved is not None:
            self._reserved.result()
            self._reserved = None
        whole, spread = split_sharded(tensors, self._comm.is_main)
        job.spread = bool(spread)
        try:
            if self._comm.is_main:
                self._replicated.fill(whole)
            if spread:
                self._sharded.fill(spread)
            if self._comm.device.type == "cuda":
                torch.cuda.current_stream(self._comm.device).synchronize()
        except (OSError, MemoryError, RuntimeError) as error:  # no memory for it; the other ranks hear of it in _write
            job.fault = self._named(f"cannot be copied: {error or 'out of memory'}")

    # ------------------------------------------------------------------------------------ in the writer's thread

    def _reserve(self, whole: int, spread: int) -> None:
        with suppress(OSError, MemoryError, RuntimeError):  # a save meets it again, and says so
            self._replicated.reserve(whole)
            self._sharded.reserve(spread)

    def _write(self, job: _Job) -> _Fault | None:
        """Writes a checkpoint, in a second attempt too where room could be made. Every rank returns the same."""
        for again in (False, True):
            fault, size = self._attempt(job)
            if self._comm.is_main:
                self._finish(job, fault, size)
            retry = fault is not None and fault.full and not again
            if not self._exchange(retry and self._comm.is_main and self._make_room(size))[0]:
                break
        return fault

    def _attempt(self, job: _Job) -> tuple[_Fault | None, int]:
        """What went wrong, and the bytes that all ranks had to write."""
        temporary = self._dir.path / f"tmp.{step_folder(job.step)}.{self._token}"
        size = len(job.state or b"") + (self._replicated.size if self._comm.is_main else 0)
        size += self._sharded.size if job.spread else 0
        mine: Any = job.fault or self._caught(lambda: self._write_own(temporary, job))
        everyone = self._exchange((mine, size))
        total = sum(size for _, size in everyone)
        hashes: dict[str, str] = {}
        for found, _ in everyone:
            if isinstance(found, _Fault):
                return found, total
            hashes |= found
        end = self._caught(lambda: self._commit(temporary, job, hashes)) if self._comm.is_main else None
        fault = self._exchange(end)[0]
        return (fault if isinstance(fault, _Fault) else None), total

    def _write_own(self, temporary: Path, job: _Job) -> dict[str, str]:
        """This rank's files and their hashes. Raises OSError."""
        temporary.mkdir(parents=True, exist_ok=True)
        hashes = {}
        if job.spread:
            name = f"shard.{self._comm.rank + 1:05d}-of-{self._comm.world:05d}.safetensors"
            hashes[name] = self._sharded.write(temporary / name)
        if job.state is not None:
            hashes[TENSORS] = self._replicated.write(temporary / TENSORS)
            hashes[STATE] = write_file(temporary / STATE, [job.state])
        return hashes

    def _commit(self, temporary: Path, job: _Job, hashes: dict[str, str]) -> None:
        unseen = [name for name in hashes if not (temporary / name).is_file()]
        if unseen:
            raise FileNotFoundError(f"{unseen[0]} is not there on rank 0: put run_dir where all nodes see it")
        final = self._dir.path / step_folder(job.step)
        commit(temporary, final, hashes)
        self._known[final] = job.saved

    def _finish(self, job: _Job, fault: _Fault | None, size: int) -> None:
        """On rank 0, after an attempt."""
        final = self._dir.path / step_folder(job.step)
        if fault is None:
            seconds = time.perf_counter() - job.began
            self._emit("checkpoint_saved", step=job.step, bytes=size, seconds=seconds, **job.stalls)
            if self._written is not None:
                self._written(final)
            self.prune()
            return
        shutil.rmtree(final.with_name(f"tmp.{final.name}.{self._token}"), ignore_errors=True)
        free = self._free()
        log.warning(
            "the checkpoint of step %d could not be written (%s): it needs %s bytes, %s are free",
            *(job.step, fault.reason, f"{size:,}", f"{free:,}"),
        )
        self._emit("checkpoint_failed", step=job.step, message=fault.reason, needed_bytes=size, free_bytes=free)

    def _exchange(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        if self._group is None:
            return [value]
        out: list[Any] = [None] * self._comm.world
        try:
            dist.all_gather_object(out, value, self._group)
        except RuntimeError as error:  # as a rank's end makes it
            raise CheckpointError(f"the ranks lost each other while a checkpoint was written: {error}") from error
        return out

    def _caught(self, call: Callable[[], T]) -> T | _Fault:
        try:
            return call()
        except OSError as error:
            return self._named(str(error), error.errno in _DISK_FULL)

    def _named(self, reason: str, full: bool = False) -> _Fault:
        return _Fault(f"rank {self._comm.rank}: {reason}" if self._comm.world > 1 else reason, full)

    # ------------------------------------------------------------------------------------------------ retention

    def prune(self) -> None:
        """Deletes what the policy does not keep. On rank 0 alone; called after each save."""
        self._prune(self._spec.keep_last)

    def _make_room(self, needed: int) -> bool:
        """Deletes the oldest beyond the policy's need, but for two, until `needed` bytes are free. Always True."""
        self._prune(min(2, self._spec.keep_last), needed)
        return True

    def _prune(self, keep_last: int, needed: int | None = None) -> None:
        good = self._good(keep_last)
        stay = steps_to_keep(list(good.values()), keep_last, self._spec.delete_previous)
        for folder in sorted((f for f, saved in good.items() if saved.step not in stay), key=step_of):
            if needed is not None and self._free() >= needed:
                return
            try:
                self._dir.remove(folder)
            except OSError as error:
                log.warning("the checkpoint %s cannot be removed: %s", folder, error)
            self._known.pop(folder, None)

    def _good(self, keep_last: int) -> dict[Path, CheckpointInfo]:
        """All checkpoints, the newest first. None is deleted on account of a damaged one: of those that an earlier
        process wrote, the newest are verified once, as many as are to be kept.
        """
        good: dict[Path, CheckpointInfo] = {}
        for folder in self._dir.folders():
            if folder not in self._known:
                fault = find_damage(folder) if len(good) < keep_last else None
                try:
                    self._known[folder] = CheckpointInfo.read(step_of(folder), (folder / STATE).read_bytes())
                except (OSError, ValueError, KeyError, TypeError) as error:
                    fault = fault or f"{STATE} cannot be read: {error}"
                if fault is not None:
                    self._known.pop(folder, None)
                    self._dir.mark_corrupt(folder, fault)
                    continue
            saved = self._known[folder]
            uploaded = None if self._uploaded is None else self._uploaded(folder)
            good[folder] = CheckpointInfo(saved.step, saved.keep, saved.score, uploaded)
        return good

    def _free(self) -> int:
        with suppress(OSError):
            return shutil.disk_usage(self._dir.path).free
        return 0

    def _tell(self, message: str) -> None:
        log.warning(message)
        self._emit("checkpoint_damaged", message=message)

    def _emit(self, kind: str, **facts: Any) -> None:
        with suppress(OSError):  # where the disk is full, it is so for events too
            self._event(kind, **facts)


_FIX = "free space, mend the disk, or choose another run_dir"
