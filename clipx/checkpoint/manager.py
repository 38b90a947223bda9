"""Checkpoint manager: cadence, retention, upload and resuming of a run's checkpoints."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.checkpoint.async_writer import AsyncWriter
from clipx.checkpoint.format import Checkpoint, CheckpointDir, find_damage, unused_name
from clipx.checkpoint.records import STATE, steps_to_keep
from clipx.checkpoint.resume import CHECKPOINTS, Resume, step_folder, step_of
from clipx.config.duration import Length
from clipx.config.lazy_torch import torch
from clipx.distributed.comm import Agreement, Comm
from clipx.errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from clipx.checkpoint.spec import CheckpointSpec
    from clipx.checkpoint.tensors import RankRows
    from clipx.checkpoint.uploader import Uploader

log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, uploads and loads the checkpoints in `run_dir` and their copies at `url`. All ranks call it alike.

    `event(kind, **facts)` records what happens to checkpoints. Call `open` after `find`, before the first `save`.
    """

    def __init__(
        self, run_dir: Path, spec: CheckpointSpec, length: Length, comm: Comm, event: Callable[..., None]
    ) -> None:
        self._run_dir, self._spec, self._comm, self._event = run_dir, spec, comm, event
        self._cadence = spec.cadence.on(length, "checkpoint.every")
        self._keep_cadence = spec.keep_cadence.on(length, "checkpoint.keep_every")
        self._report_damage = partial(self._warn, "checkpoint_damaged")
        self._dir = CheckpointDir(run_dir / CHECKPOINTS, self._report_damage)
        self.url = None if spec.remote is None else run_url(spec.remote, run_dir)
        self._writer: AsyncWriter | None = None
        self._uploader: Uploader | None = None  # on rank 0
        self._last_time = time.monotonic()  # of the last save, or of the start
        self._last_samples = 0
        self._best: float | None = None  # the highest value of `spec.best`
        self._rewound_to: int | None = None  # the step of resume=step:…
        self._agreement = Agreement()

    @property
    def enabled(self) -> bool:
        """True unless checkpoint.every=none."""
        return self._spec.every != "none"

    # ------------------------------------------------------------------------------------------------ resuming

    def fetch(self, resume: Resume) -> None:
        """Downloads what resuming from a URL needs, if it is newer than the local checkpoints. Collective.

        Raises CheckpointError if a new run would overwrite a run at `checkpoint.remote`, StorageError if the storage
        cannot be reached and there is no local checkpoint either.
        """
        source = resume.url or self.url
        if source is not None:
            self._comm.run_on_main(lambda: self._fetch(resume, source))

    def _fetch(self, resume: Resume, source: str) -> None:
        from clipx.checkpoint.downloader import (
            RETRY_S,
            check_new,
            fetch,
            fetch_history,
            fetch_newest,
            remote_checkpoints,
        )

        if not resume.enabled:
            check_new(source, RETRY_S)
            return
        here = self._newest_local()
        try:
            fetch_history(source, self._run_dir, RETRY_S)
            if resume.step is None:
                fetch_newest(source, self._dir.path, self._report_damage, RETRY_S, after=here)
            elif not (self._dir.path / step_folder(resume.step)).exists():
                there = dict(remote_checkpoints(source, RETRY_S))
                if resume.step in there:
                    fetch(there[resume.step], self._dir.path, RETRY_S)
        except StorageError as error:
            if here < 0 or resume.url is not None:
                raise
            self._warn("remote_not_reached", f"{error}; continuing from step {here}, the newest local checkpoint")

    def _newest_local(self) -> int:
        """Returns the step of the newest local checkpoint whose hashes match, or -1. Marks damaged ones as corrupt."""
        for folder in self._dir.folders():
            if (damage := find_damage(folder)) is None:
                return step_of(folder)
            self._dir.mark_corrupt(folder, damage)
        return -1

    def find(self, resume: Resume) -> Checkpoint | None:
        """Loads the checkpoint to resume from, or returns None for a new run. Collective. Raises CheckpointError."""
        if not resume.enabled:
            return None
        self._comm.run_on_main(self._dir.remove_incomplete)
        found = self._dir.load_on_all(self._comm, resume.step)
        if found is None:
            if resume.required:
                raise CheckpointError(f"{self._run_dir} holds no checkpoint to resume from: use resume=none")
            return None
        _check_state(found)
        if resume.step is not None:
            self._rewound_to = found.step
            self._comm.run_on_main(lambda: self._abandon_newer(found.step))
        self._last_samples = int(found.state["samples_seen"])
        self._best = found.state["best"]
        return found

    def _abandon_newer(self, step: int) -> None:
        """Renames the checkpoints of steps after the one that the run resumes from."""
        for folder in self._dir.folders():
            if step_of(folder) > step:
                left = unused_name(folder, "left")
                try:
                    folder.rename(left)
                except OSError as error:
                    raise CheckpointError(
                        f"{folder} cannot be renamed ({error.strerror}), and a later resume would continue from it: "
                        "correct the permissions of its folder"
                    ) from None
                self._event(
                    "checkpoint_left", message=f"continuing from step {step}: renamed {folder.name} to {left.name}"
                )

    def load(self) -> Checkpoint | None:
        """Waits for a save in progress and loads the newest checkpoint. Collective."""
        if self._writer is not None:
            with suppress(CheckpointError):  # the previous checkpoint exists
                self._writer.wait()
        return self._dir.load_on_all(self._comm)

    # -------------------------------------------------------------------------------------------------- saving

    def open(self) -> None:
        """Starts the writer and, on rank 0, the uploader. Collective."""
        if not self.enabled:
            return
        if self.url is not None and self._comm.is_main:
            from clipx.checkpoint.uploader import Uploader

            keep = partial(steps_to_keep, keep_last=self._spec.keep_last)  # even if local copies are deleted earlier
            self._uploader = Uploader(self._run_dir, self.url, self._event, keep, self._rewound_to)
        uploaded = None if self._uploader is None else self._uploader.is_uploaded
        on_commit = None if self._uploader is None else self._uploader.submit
        self._writer = AsyncWriter(
            self._dir.path, self._spec, self._comm, self._event, is_uploaded=uploaded, on_commit=on_commit
        )

    def reserve(self, tensors: Mapping[str, torch.Tensor | RankRows]) -> None:
        """Allocates the memory for `save` in the background. Call it once, when the optimizer has its state."""
        if self._writer is not None:
            self._writer.reserve(tensors)

    def due(self, before: int, after: int) -> bool:
        """Returns whether a checkpoint is due in the samples (before, after].

        A cadence in minutes follows rank 0's clock, one call late with several ranks, and is then a collective.
        """
        if self._cadence.seconds is None:
            return self._cadence.due(before, after)
        over = time.monotonic() - self._last_time >= self._cadence.seconds
        return bool(self._agreement.exchange(self._comm, int(over and self._comm.is_main)))

    @property
    def at_end(self) -> bool:
        return self._cadence.at_end

    def is_new_best(self, numbers: Mapping[str, float]) -> bool:
        """Returns whether an evaluation has the highest `checkpoint.best` so far. Collective."""
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
        until_update: Collection[str] = (),
    ) -> None:
        """Starts a save as `AsyncWriter.save`. `numbers`: the state's evaluation metrics by name. Collective."""
        assert self._writer is not None
        samples = int(state["samples_seen"])
        score = numbers.get(self._spec.best) if self._spec.best is not None else None
        if score is not None and self._is_better(score):
            self._best = score
        state["best"] = self._best
        keep = self._keep_cadence.due(self._last_samples, samples)
        self._writer.save(step, tensors, state, keep=keep, score=score, until_update=until_update)
        self._last_samples, self._last_time = samples, time.monotonic()

    def hold_updates(self) -> None:
        """Makes updates of the state wait on the device for copies in progress. Call it before the optimizer's step."""
        if self._writer is not None:
            self._writer.hold_updates()

    def _is_better(self, score: float) -> bool:
        return math.isfinite(score) and (self._best is None or score > self._best)

    def metrics(self) -> dict[str, float]:
        """Returns metrics to log, on rank 0."""
        return {} if self._uploader is None else {"checkpoint/remote_lag_s": self._uploader.lag_s}

    def wait(self) -> None:
        """Waits until all saves are on disk. Raises CheckpointError if the last save failed. Collective."""
        if self._writer is not None:
            self._writer.wait()

    def wait_for_uploads(self) -> bool:
        """Waits for uploads on rank 0, up to `checkpoint.sync_timeout_s`. Returns whether all of them are at `url`."""
        return self._uploader is None or self._uploader.finish(self._spec.sync_timeout_s)

    def close(self) -> None:
        """Waits for a save in progress and cancels uploads."""
        if self._writer is not None:
            self._writer.close()
        if self._uploader is not None:
            self._uploader.close()

    def _warn(self, kind: str, message: str) -> None:
        log.warning(message)
        self._event(kind, message=message)


def check_storage(spec: CheckpointSpec, run_dir: str, url: str | None, comm: Comm) -> None:
    """Verifies that `checkpoint.remote` can be written and `url`, of `resume=`, be read. Collective.

    An outage is no error: `CheckpointManager.fetch` waits for its end. Raises ConfigError or CheckpointError.
    """

    def check() -> None:
        if spec.remote is None and url is None:
            return
        from clipx.checkpoint.downloader import check_writable, remote_checkpoints

        with suppress(StorageError):
            if spec.remote is not None:
                check_writable(run_url(spec.remote, Path(run_dir)), retry_s=0)
            if url is not None:
                remote_checkpoints(url, retry_s=0)

    comm.run_on_main(check)


def _check_state(found: Checkpoint) -> None:
    """Raises CheckpointError if a value that resuming reads is missing."""
    if missing := sorted({"samples_seen", "world", "data", "overdue", "non_finite", "best"} - found.state.keys()):
        raise CheckpointError(
            f"{found.folder}/{STATE} has no {', '.join(missing)}: resume with the version of clipx that wrote it, or "
            "restore the file"
        )


def run_url(remote: str, run_dir: Path) -> str:
    """Returns the URL of a run's copy: `remote` plus the run directory, without the working directory if it is below.

    So runs of several sweeps have different URLs: their folders all end in 0, 1, 2.
    """
    path, here = run_dir.resolve(), Path.cwd()
    below = path.is_relative_to(here) and path != here
    return f"{remote.rstrip('/')}/{path.relative_to(here if below else '/').as_posix()}"
