"""A run's checkpoints: when they are saved, which stay, where they go, and which one a run goes on from."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.checkpoint.async_writer import AsyncWriter
from clipx.checkpoint.downloader import RETRY_S, check_writable, fetch, fetch_history, fetch_newest, remote_checkpoints
from clipx.checkpoint.format import STATE, Checkpoint, CheckpointDir, RankRows, find_damage
from clipx.checkpoint.resume import CHECKPOINTS, Resume, step_folder, step_of
from clipx.checkpoint.retention import CheckpointInfo, steps_to_keep
from clipx.checkpoint.uploader import Uploader
from clipx.config.duration import Cadence, Length
from clipx.config.lazy_torch import torch
from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from clipx.checkpoint.spec import CheckpointSpec

log = logging.getLogger(__name__)


class CheckpointManager:
    """The checkpoints in `run_dir`, and their copies at `url`. Used by all ranks at the same points.

    `event(kind, **facts)` is told of what happens to them. After `find`, `open` makes it ready to save.
    """

    def __init__(
        self, run_dir: Path, spec: CheckpointSpec, length: Length, comm: Comm, event: Callable[..., None]
    ) -> None:
        self._run_dir, self._spec, self._comm, self._event = run_dir, spec, comm, event
        self._cadence = Cadence.parse(spec.every, "checkpoint.every", length, clock=True)
        self._keep = Cadence.parse(spec.keep_every, "checkpoint.keep_every", length)
        self._dir = CheckpointDir(run_dir / CHECKPOINTS, self._damaged)
        self.url = None if spec.remote is None else _own_url(spec.remote, run_dir)
        self._writer: AsyncWriter | None = None
        self._uploader: Uploader | None = None  # on rank 0
        self._reached = True  # whether the storage answered when it was looked at for checkpoints; on rank 0
        self._last_time = time.monotonic()  # of the last save, or the start
        self._last_samples = 0
        self._best: float | None = None  # what `spec.best` was at most
        self._back_to: int | None = None  # the step that the run was told to go back to

    @property
    def enabled(self) -> bool:
        """Whether anything is ever saved."""
        return self._spec.every != "none"

    # ------------------------------------------------------------------------------------------------ resuming

    def fetch(self, resume: Resume) -> None:
        """Brings here what a run at a URL needs to go on, where that is newer than what is here. Collective.

        Raises CheckpointError where a new run would write over one at `checkpoint.remote`, StorageError where the
        storage cannot be reached and there is nothing here either.
        """
        source = resume.url or self.url
        if source is not None:
            self._comm.run_on_main(lambda: self._fetch(resume, source))

    def _fetch(self, resume: Resume, source: str) -> None:
        if not resume.enabled:
            if remote_checkpoints(source, RETRY_S):
                raise CheckpointError(
                    f"{source} already holds a run: continue it with resume=auto, or give this one another name="
                )
            return
        here = self._newest_here()
        try:
            fetch_history(source, self._run_dir, RETRY_S)
            if resume.step is None:
                fetch_newest(source, self._dir.path, self._damaged, RETRY_S, after=here)
            elif not (self._dir.path / step_folder(resume.step)).exists():
                there = dict(remote_checkpoints(source, RETRY_S))
                if resume.step in there:
                    fetch(there[resume.step], self._dir.path, RETRY_S)
        except StorageError as error:
            if here < 0 or resume.url is not None:
                raise
            self._reached = False
            self._warn("remote_not_reached", f"{error}; going on from step {here}, the newest here")

    def _newest_here(self) -> int:
        """The step of the newest checkpoint whose hashes hold, -1 where there is none."""
        for folder in self._dir.folders():
            if (fault := find_damage(folder)) is None:
                return step_of(folder)
            self._dir.mark_corrupt(folder, fault)
        return -1

    def find(self, resume: Resume) -> Checkpoint | None:
        """The checkpoint to go on from. Collective. Raises CheckpointError where there is none and must be one."""
        if not resume.enabled:
            return None
        self._comm.run_on_main(self._dir.remove_incomplete)
        found = self._dir.load_on_all(self._comm, resume.step)
        if found is None:
            if resume.required:
                raise CheckpointError(f"{self._run_dir} holds no checkpoint to go on from: start it with resume=none")
            return None
        _check_state(found)
        if resume.step is not None:
            self._back_to = found.step
            self._comm.run_on_main(lambda: self._leave_newer(found.step))
        self._last_samples = int(found.state["samples_seen"])
        self._best = found.state["best"]
        return found

    def _leave_newer(self, step: int) -> None:
        """What came after the step that a run goes back to is another's future: kept under another name."""
        for folder in self._dir.folders():
            if step_of(folder) > step:
                left = folder.rename(folder.with_name(f"{folder.name}.left.{int(time.time())}"))
                self._event("checkpoint_left", message=f"going on from step {step}: {folder.name} is now {left.name}")

    def load(self) -> Checkpoint | None:
        """The newest checkpoint, once it is on disk. Collective."""
        if self._writer is not None:
            with suppress(CheckpointError):  # the one before is there
                self._writer.wait()
        return self._dir.load_on_all(self._comm)

    # -------------------------------------------------------------------------------------------------- saving

    def open(self) -> None:
        """Collective."""
        if not self.enabled:
            return
        if self.url is not None:
            self._comm.run_on_main(partial(self._open_uploader, self.url))
        uploaded = None if self._uploader is None else self._uploader.uploaded
        on_commit = None if self._uploader is None else self._uploader.put
        self._writer = AsyncWriter(
            self._dir.path, self._spec, self._comm, self._event, is_uploaded=uploaded, on_commit=on_commit
        )

    def _open_uploader(self, url: str) -> None:
        """Raises ConfigError where the URL can never be written. An outage is waited for beside the training."""
        try:
            if self._reached:
                check_writable(url, RETRY_S)
        except StorageError as error:
            self._warn("remote_not_reached", f"{error}; training goes on, and uploads are tried again")
        self._uploader = Uploader(self._run_dir, url, self._event, self._stay_there, self._back_to)

    def reserve(self, tensors: Mapping[str, torch.Tensor | RankRows]) -> None:
        """Makes the memory for `save` beside the training: called once, when the optimizer has its state."""
        if self._writer is not None:
            self._writer.reserve(tensors)

    def due(self, before: int, after: int) -> bool:
        """Whether a checkpoint is due in the samples (before, after]. Collective where it goes by the clock."""
        if self._cadence.seconds is None:
            return self._cadence.due(before, after)
        over = time.monotonic() - self._last_time >= self._cadence.seconds
        return bool(self._comm.max(int(over and self._comm.is_main))[0])

    @property
    def at_end(self) -> bool:
        return self._cadence.at_end

    def is_new_best(self, numbers: Mapping[str, float]) -> bool:
        """Whether what was just evaluated is the best so far, by the metric `checkpoint.best`. Collective."""
        name = self._spec.best
        if name is None or not numbers:
            return False
        return bool(self._comm.broadcast_object(name in numbers and self._is_better(numbers[name])))

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor | RankRows],
        state: dict[str, Any],
        numbers: Mapping[str, float],
    ) -> None:
        """Begins a checkpoint of this moment, of which `numbers` were evaluated. Collective."""
        assert self._writer is not None
        samples = int(state["samples_seen"])
        score = numbers.get(self._spec.best) if self._spec.best is not None else None
        if score is not None and self._is_better(score):
            self._best = score
        state["best"] = self._best
        self._writer.save(step, tensors, state, keep=self._keep.due(self._last_samples, samples), score=score)
        self._last_samples, self._last_time = samples, time.monotonic()

    def _is_better(self, score: float) -> bool:
        return math.isfinite(score) and (self._best is None or score > self._best)

    def metrics(self) -> dict[str, float]:
        """For the log; on rank 0."""
        return {} if self._uploader is None else {"checkpoint/remote_lag_s": self._uploader.lag_s}

    def wait(self) -> None:
        """Until everything is on disk. Collective. Raises CheckpointError where the last save failed."""
        if self._writer is not None:
            self._writer.wait()

    def wait_for_uploads(self) -> bool:
        """Whether everything is at `url`, for which rank 0 waits up to `checkpoint.sync_timeout_s`."""
        return self._uploader is None or self._uploader.finish(self._spec.sync_timeout_s)

    def close(self) -> None:
        """Lets a save that is under way end; an upload that is not done is given up."""
        if self._writer is not None:
            self._writer.close()
        if self._uploader is not None:
            self._uploader.close()

    def _stay_there(self, saved: Sequence[CheckpointInfo]) -> set[int]:
        """The policy of the URL: that of the disk, whatever is deleted there."""
        return steps_to_keep(saved, self._spec.keep_last)

    def _damaged(self, message: str) -> None:
        self._warn("checkpoint_damaged", message)

    def _warn(self, kind: str, message: str) -> None:
        log.warning(message)
        self._event(kind, message=message)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_STATE: dict[str, Callable[[Any], bool]] = {  # what a run goes on by
    "samples_seen": _is_count,
    "world": _is_count,
    "data": lambda value: isinstance(value, str),
    "overdue": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "non_finite": lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)),
    "best": lambda value: value is None or isinstance(value, int | float),
}


def _check_state(found: Checkpoint) -> None:
    """Raises CheckpointError where a value is missing or is not of the kind that is saved: it came from elsewhere."""
    for key, is_right in _STATE.items():
        value = found.state.get(key, "nothing") if isinstance(found.state, dict) else found.state
        if not is_right(value):
            raise CheckpointError(
                f"{found.folder}/{STATE} holds {str(value)[:40]} as {key}, which clipx does not write: restore it"
            )


def _own_url(remote: str, run_dir: Path) -> str:
    """Where the copy of a run is: named as its directory is from where the command was given, or by its last part."""
    place, here = run_dir.resolve(), Path.cwd()
    name = place.relative_to(here).as_posix() if place.is_relative_to(here) and place != here else place.name
    return f"{remote.rstrip('/')}/{name}"
