"""Copies a run directory to a URL beside the training. remote.py says what is there, and reads it.

What is uploaded is listed, not read back: S3, GCS and Azure check a checksum of each request's body before they take
it, and an ETag is the MD5 only of an object in one part that is not encrypted. Whoever fetches compares every SHA-256.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipx.checkpoint.downloader import HISTORY_FILES, group_by_checkpoint
from clipx.checkpoint.format import MANIFEST, STATE
from clipx.checkpoint.resume import CHECKPOINTS, is_checkpoint, step_of
from clipx.checkpoint.retention import CheckpointInfo
from clipx.storage.remote import StorageFolder, TransferStopped, backoff, error_text

log = logging.getLogger(__name__)

Keep = Callable[[Sequence[CheckpointInfo]], Collection[int]]
"""The policy: of these checkpoints -> the steps that stay, as `retention.steps_to_keep` says."""

_SMALL = (*HISTORY_FILES, "report.html", "report.png")
_LEFT = "MANIFEST.left.json"
_PAUSES = (1.0, 300.0)  # between tries to upload: the second, and at most
_TRIES = 3  # of a request: of thousands of parts some fail on a storage that works
_LAST_PAUSE = 5.0  # at most, when the run is over and waits
_TOLD_EVERY = 1800.0  # seconds between lines about the same outage
_CLOSE_S = 5.0  # for the thread to end
_ORPHAN_S = 24 * 3600.0  # after which a checkpoint without a manifest is no upload in progress


@dataclass(eq=False, slots=True)
class _Job:
    """A checkpoint to be uploaded."""

    folder: Path
    fresh: bool  # just saved: whatever is at the URL is older
    since: float = field(default_factory=time.monotonic)
    sent: set[str] = field(default_factory=set)  # files, so that a cut does not begin again with the first

    def manifest(self) -> bytes | None:
        """None where the checkpoint was deleted meanwhile."""
        try:
            return (self.folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            return None


class Uploader:
    """Copies a run directory's checkpoints to a URL, the newest first, in one thread; on rank 0.

    What lies in the directory when it is made is uploaded too, where it is not there. While the storage fails it tries
    again, for as long as the run lasts. `keep` says which checkpoints stay at the URL; None: all. A run that goes
    `back_to` a step makes the later ones there another's future, which do not count any more: their manifests are
    renamed before anything is uploaded.

    Events: uploaded (checkpoint, seconds, bytes); upload_failed (checkpoint, message, lag_s), at an outage's first
    failure and every half hour; upload_skipped (checkpoint), an older one that `keep` would not keep; remote_left
    (checkpoint); remote_not_tidied (message).
    """

    def __init__(
        self,
        run_dir: Path,
        url: str,
        event: Callable[..., None],
        keep: Keep | None = None,
        back_to: int | None = None,
    ) -> None:
        self._run_dir, self._event, self._keep, self._back_to = run_dir, event, keep, back_to
        self._stop = threading.Event()
        self._remote = StorageFolder(url, self._stop, _TRIES)
        self._changed = threading.Condition()  # guards the next four
        self._jobs = {
            p.name: _Job(p, fresh=False) for p in (run_dir / CHECKPOINTS).glob("step-*") if is_checkpoint(p.name)
        }
        self._done: set[str] = set()
        self._finishing = False
        self._files_due = False
        self._sent: dict[str, tuple[int, int]] = {}  # small files: time and size
        self._saved: dict[str, CheckpointInfo] = {}  # of checkpoints at the URL
        self._told = -_TOLD_EVERY
        self._thread = threading.Thread(target=self._run, daemon=True, name="clipx-uploader")
        self._thread.start()

    # From here to `close`: for the training, none of which waits for the storage except `finish`.

    def put(self, folder: Path) -> None:
        """A checkpoint that was just saved. Returns at once."""
        with self._changed:
            self._done.discard(folder.name)
            self._jobs[folder.name] = _Job(folder, fresh=True)
            self._changed.notify_all()

    def uploaded(self, folder: Path) -> bool:
        """Whether it may be deleted here: it is whole at the URL, or the policy does not want it there."""
        with self._changed:
            return folder.name in self._done

    @property
    def lag_s(self) -> float:
        """How long the oldest checkpoint that is not uploaded has been waiting."""
        with self._changed:
            return max((time.monotonic() - job.since for job in self._jobs.values()), default=0.0)

    def finish(self, timeout_s: float) -> bool:
        """Waits until everything is uploaded, the small files last. False if it is not by then."""
        with self._changed:
            self._finishing = self._files_due = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._jobs and not self._files_due, timeout_s)

    def close(self) -> None:
        """Ends the thread, within a request where the file system cannot be interrupted; else within a second."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    # From here on: the thread.

    def _run(self) -> None:
        waits = backoff(*_PAUSES)
        while not self._stop.is_set():
            job = self._next()
            try:
                self._leave_newer()
                if job is None:
                    self._copy_small()
                else:
                    self._copy(job)
            except TransferStopped:
                return
            except Exception as error:  # a remote file system raises what its library does
                if (
                    job is None or job.manifest() is not None
                ):  # else it was deleted meanwhile, which the next look finds
                    self._tell_failure(job, error)
                    self._wait(next(waits))
            else:
                self._settle(job)
                waits = backoff(*_PAUSES)

    def _next(self) -> _Job | None:
        """The newest checkpoint; None when only the small files are left, or the thread is to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or self._jobs or self._files_due)
            return max(self._jobs.values(), key=lambda job: step_of(job.folder), default=None)

    def _settle(self, job: _Job | None) -> None:
        with self._changed:
            if job is None:
                self._files_due = False
            elif self._jobs.get(job.folder.name) is job:  # else it was saved again meanwhile
                del self._jobs[job.folder.name]
                self._done.add(job.folder.name)
            self._told = -_TOLD_EVERY
            self._changed.notify_all()

    def _wait(self, pause: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or self._finishing, pause)
        if self._finishing:
            self._stop.wait(min(pause, _LAST_PAUSE))

    def _copy(self, job: _Job) -> None:
        start, name = time.monotonic(), job.folder.name
        manifest = job.manifest()
        if manifest is None:
            return
        there = self._remote.files(f"{CHECKPOINTS}/{name}")
        there = {file.rpartition("/")[2]: size for file, size in there.items()}
        sizes = {file: (job.folder / file).stat().st_size for file in json.loads(manifest)}
        if not job.fresh and self._is_there(name, manifest, sizes, there):
            return
        if not self._wanted(job.folder):
            self._tell("upload_skipped", checkpoint=name)
            return
        if MANIFEST in there:  # of another checkpoint of this step, which does not count from now on
            self._remote.remove(f"{CHECKPOINTS}/{name}/{MANIFEST}")
        for file in sizes.keys() - job.sent:
            self._remote.put(job.folder / file, f"{CHECKPOINTS}/{name}/{file}")
            job.sent.add(file)
        self._copy_small()
        self._complete(job, manifest, sizes)
        self._tell("uploaded", checkpoint=name, seconds=round(time.monotonic() - start, 3), bytes=sum(sizes.values()))
        self._tidy(job.folder)

    def _complete(self, job: _Job, manifest: bytes, sizes: dict[str, int]) -> None:
        """Verifies what is at the URL, and makes it count."""
        place = f"{CHECKPOINTS}/{job.folder.name}"
        there = {file.rpartition("/")[2]: size for file, size in self._remote.files(place).items()}
        for file, size in sizes.items():
            if there.get(file) != size:
                job.sent.discard(file)
                raise OSError(f"{file} has {there.get(file, 0):,} bytes there, and {size:,} here")
        if job.manifest() != manifest:
            job.sent.clear()
            raise OSError("the checkpoint was saved again while it was sent")
        for file in there.keys() - sizes.keys():
            self._remote.remove(f"{place}/{file}")
        self._remote.write(f"{place}/{MANIFEST}", manifest)
        if self._remote.read(f"{place}/{MANIFEST}") != manifest:
            raise OSError(f"{MANIFEST} is not there as it was sent")
        self._saved.pop(job.folder.name, None)

    def _is_there(self, name: str, manifest: bytes, sizes: dict[str, int], there: dict[str, int]) -> bool:
        if there != {**sizes, MANIFEST: len(manifest)}:
            return False
        return self._remote.read(f"{CHECKPOINTS}/{name}/{MANIFEST}") == manifest

    def _copy_small(self) -> None:
        """As they are now: they grow while the training goes on."""
        for name in _SMALL:
            path = self._run_dir / name
            if path.is_file():
                stat = path.stat()
                if self._sent.get(name) != (stat.st_mtime_ns, stat.st_size):
                    self._remote.write(name, path.read_bytes())
                    self._sent[name] = (stat.st_mtime_ns, stat.st_size)

    # ------------------------------------------------------------------------------------------------- tidying

    def _leave_newer(self) -> None:
        """Once, before anything is uploaded."""
        if self._back_to is None:
            return
        for name, files in self._found().items():
            if step_of(Path(name)) > self._back_to and MANIFEST in files:
                place = f"{CHECKPOINTS}/{name}"
                self._remote.write(f"{place}/{_LEFT}", self._remote.read(f"{place}/{MANIFEST}"))
                self._remote.remove(f"{place}/{MANIFEST}")
                self._tell("remote_left", checkpoint=name)
        self._back_to = None

    def _wanted(self, folder: Path) -> bool:
        """Whether the policy would keep it at the URL. After an outage many wait, of which few are worth sending."""
        step = step_of(folder)
        if self._keep is None or all(step_of(Path(name)) < step for name in self._done):
            return True
        there = {one.step: one for one in self._saved_there(self._found())}
        return step in self._keep(
            list({**there, step: CheckpointInfo.read(step, (folder / STATE).read_bytes())}.values())
        )

    def _tidy(self, just: Path) -> None:
        """Removes what the policy does not keep, and what was begun long ago and never ended."""
        try:
            found = self._found()
            if self._keep is not None:
                saved = self._saved_there(found)
                gone = {one.step for one in saved} - set(self._keep(saved)) - {step_of(just)}
                for name in [name for name in found if step_of(Path(name)) in gone]:
                    self._remove(name)
            for name, files in found.items():
                orphan = not {MANIFEST, _LEFT} & set(files) and name not in self._jobs
                if orphan and self._is_old(name, files):
                    self._remote.remove_all(f"{CHECKPOINTS}/{name}")
            mine = f"{CHECKPOINTS}/{just.name}/"  # of an attempt that was cut
            self._remote.abort_uploads(CHECKPOINTS, lambda name, age_s: age_s >= _ORPHAN_S or name.startswith(mine))
        except TransferStopped:
            raise
        except Exception as error:  # the checkpoint is there all the same
            self._tell("remote_not_tidied", message=error_text(error))

    def _found(self) -> dict[str, list[str]]:
        """The files of each checkpoint at the URL, whether it counts or not."""
        return group_by_checkpoint(self._remote.files(CHECKPOINTS))

    def _saved_there(self, found: dict[str, list[str]]) -> list[CheckpointInfo]:
        """What the policy knows of each checkpoint that counts. One that cannot be read stays."""
        names = [name for name, files in found.items() if MANIFEST in files]
        for name in [name for name in names if name not in self._saved]:
            step = step_of(Path(name))
            try:
                self._saved[name] = CheckpointInfo.read(step, self._remote.read(f"{CHECKPOINTS}/{name}/{STATE}"))
            except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
                self._saved[name] = CheckpointInfo(step, keep=True)
        return [self._saved[name] for name in names]

    def _is_old(self, name: str, files: list[str]) -> bool:
        return min(self._remote.age_s(f"{CHECKPOINTS}/{name}/{file}") for file in files) > _ORPHAN_S

    def _remove(self, name: str) -> None:
        """The manifest first: what is left if the rest fails counts for nothing, and is an orphan."""
        self._remote.remove(f"{CHECKPOINTS}/{name}/{MANIFEST}")
        self._remote.remove_all(f"{CHECKPOINTS}/{name}")
        self._saved.pop(name, None)

    # ------------------------------------------------------------------------------------------------- telling

    def _tell_failure(self, job: _Job | None, error: Exception) -> None:
        if time.monotonic() - self._told < _TOLD_EVERY:
            return
        self._told = time.monotonic()
        what = "the run's files" if job is None else job.folder.name
        log.warning("%s cannot be uploaded to %s (%s): trying again", what, self._remote.url, error_text(error))
        self._tell("upload_failed", checkpoint=what, message=error_text(error), lag_s=round(self.lag_s, 1))

    def _tell(self, kind: str, **facts: Any) -> None:
        try:
            self._event(kind, **facts)
        except OSError as error:  # a full disk must not end the uploads
            log.warning("the event %s %s cannot be written: %s", kind, facts, error)
