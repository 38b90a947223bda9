"""Uploads a run directory to a URL while training continues. downloader.py reads it.

Uploads are verified by listing, not by reading back: S3, GCS and Azure verify a checksum of each request's body before
they accept it, and an ETag is the MD5 only of a single-part object without encryption. Downloads verify every SHA-256.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clipx.checkpoint.downloader import group_by_checkpoint, history_files
from clipx.checkpoint.format import find_damage
from clipx.checkpoint.records import MANIFEST, STATE, CheckpointInfo, DamagedCheckpoint, read_manifest
from clipx.checkpoint.resume import CHECKPOINTS, is_checkpoint, step_of
from clipx.storage.failure import Failure, error_text
from clipx.storage.remote import StorageFolder, TransferStopped, backoff, reload_credentials

log = logging.getLogger(__name__)

RetentionPolicy = Callable[[Sequence[CheckpointInfo]], Collection[int]]
"""Callable that returns the steps of the checkpoints to keep, such as `steps_to_keep`."""

_REPORT = ("report.html", "report.png")
_ABANDONED_MANIFEST = "MANIFEST.left.json"
_BACKOFF_S = (1.0, 300.0)  # first and longest pause between upload attempts
_ATTEMPTS = 3  # per request: of thousands of parts some fail even on a working storage
_FINAL_PAUSE_S = 5.0  # longest pause between attempts while the end of the run waits
_REPORT_EVERY_S = 1800.0  # between log lines about the same outage
_CLOSE_S = 5.0  # time limit for the thread to end
_ORPHAN_S = 24 * 3600.0  # a remote checkpoint without a manifest is an abandoned upload after this time


@dataclass(eq=False, slots=True)
class _Upload:
    """Checkpoint in the upload queue."""

    folder: Path
    fresh: bool  # just saved: a copy at the URL is older
    since: float = field(default_factory=time.monotonic)
    sent: set[str] = field(default_factory=set)  # names of uploaded files, which a retry skips

    def manifest(self) -> bytes | None:
        """Reads the manifest. Returns None if the checkpoint has been deleted."""
        try:
            return (self.folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            return None


class Uploader:
    """Uploads a run directory's checkpoints to a URL, newest first, in one thread of rank 0.

    Checkpoints that are in the directory at the start are uploaded too, unless they are at the URL. Storage failures
    are retried until the run ends. `keep` selects the checkpoints to keep at the URL; None: all. If the run was
    `rewound_to` a step, later checkpoints at the URL are abandoned first: their manifests are renamed.
    """

    def __init__(
        self,
        run_dir: Path,
        url: str,
        event: Callable[..., None],
        keep: RetentionPolicy | None = None,
        rewound_to: int | None = None,
    ) -> None:
        self._run_dir, self._event, self._keep, self._rewound_to = run_dir, event, keep, rewound_to
        self._stop = threading.Event()
        self._remote = StorageFolder(url, self._stop, _ATTEMPTS)
        self._changed = threading.Condition()  # guards the next four attributes
        self._jobs = {
            p.name: _Upload(p, fresh=False) for p in (run_dir / CHECKPOINTS).glob("step-*") if is_checkpoint(p.name)
        }
        self._done: set[str] = set()
        self._finishing = False
        self._files_due = False
        self._sent_stats: dict[str, tuple[int, int]] = {}  # modification time and size of small files at their upload
        self._infos: dict[str, CheckpointInfo] = {}  # of checkpoints at the URL
        self._reported_at = -_REPORT_EVERY_S
        self._thread = threading.Thread(target=self._run, daemon=True, name="clipx-uploader")
        self._thread.start()

    # Methods for the training thread. Only `finish` waits for the storage.

    def submit(self, folder: Path) -> None:
        """Queues a checkpoint that was just saved. Returns at once."""
        with self._changed:
            self._done.discard(folder.name)
            self._jobs[folder.name] = _Upload(folder, fresh=True)
            self._changed.notify_all()

    def is_uploaded(self, folder: Path) -> bool:
        """Returns whether a checkpoint is verified at the URL, or the policy does not keep it there."""
        with self._changed:
            return folder.name in self._done

    @property
    def lag_s(self) -> float:
        """Seconds since the oldest checkpoint in the queue was submitted, or 0."""
        with self._changed:
            return max((time.monotonic() - job.since for job in self._jobs.values()), default=0.0)

    def finish(self, timeout_s: float) -> bool:
        """Waits until all checkpoints and the run's files are uploaded. Returns False after `timeout_s` seconds."""
        with self._changed:
            self._finishing = self._files_due = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._jobs and not self._files_due, timeout_s)

    def close(self) -> None:
        """Stops the thread within a second, or after its request if the file system cannot be interrupted."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    # Methods of the upload thread.

    def _run(self) -> None:
        waits = backoff(*_BACKOFF_S)
        while not self._stop.is_set():
            job = self._next()
            try:
                self._abandon_newer()
                if job is None:
                    self._upload_run_files()
                else:
                    self._upload(job)
            except TransferStopped:
                return
            except Exception as error:  # a remote file system may raise any error of its library
                failure = Failure.classify(self._remote.url, error)
                if failure.refuses_all:
                    reload_credentials(self._remote.url)  # they may have expired, and been renewed
                if job is None or job.manifest() is not None:  # else it was deleted, which the next attempt handles
                    self._report_failure(job, failure)
                    self._pause(next(waits))
            else:
                self._mark_done(job)
                waits = backoff(*_BACKOFF_S)

    def _next(self) -> _Upload | None:
        """Waits for work. Returns the newest checkpoint, or None if only small files remain or the thread must stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or self._jobs or self._files_due)
            return max(self._jobs.values(), key=lambda job: step_of(job.folder), default=None)

    def _mark_done(self, job: _Upload | None) -> None:
        with self._changed:
            if job is None:
                self._files_due = False
            elif self._jobs.get(job.folder.name) is job:  # else it has been saved again
                del self._jobs[job.folder.name]
                self._done.add(job.folder.name)
            self._reported_at = -_REPORT_EVERY_S
            self._changed.notify_all()

    def _pause(self, pause: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or self._finishing, pause)
        if self._finishing:
            self._stop.wait(min(pause, _FINAL_PAUSE_S))

    def _upload(self, job: _Upload) -> None:
        start, name = time.monotonic(), job.folder.name
        manifest = job.manifest()
        if manifest is None:
            return
        remote = self._sizes(name)
        if not job.fresh and (damage := find_damage(job.folder)):
            self._event("upload_skipped", checkpoint=name, message=f"it is damaged: {damage}")
            return
        sizes = {file: (job.folder / file).stat().st_size for file in read_manifest(manifest)}
        complete = remote == {**sizes, MANIFEST: len(manifest)}
        if not job.fresh and complete and self._remote.read(f"{CHECKPOINTS}/{name}/{MANIFEST}") == manifest:
            return
        if not self._is_kept(job.folder):
            self._event("upload_skipped", checkpoint=name)
            return
        if MANIFEST in remote:  # an earlier checkpoint of this step, now replaced
            self._remote.remove(f"{CHECKPOINTS}/{name}/{MANIFEST}")
        for file in sizes.keys() - job.sent:
            self._remote.put(job.folder / file, f"{CHECKPOINTS}/{name}/{file}")
            job.sent.add(file)
        self._upload_run_files()
        self._commit(job, manifest, sizes)
        self._event("uploaded", checkpoint=name, seconds=round(time.monotonic() - start, 3), bytes=sum(sizes.values()))
        self._prune(job.folder)

    def _commit(self, job: _Upload, manifest: bytes, sizes: dict[str, int]) -> None:
        """Verifies the sizes of the files at the URL and writes the manifest."""
        path = f"{CHECKPOINTS}/{job.folder.name}"
        remote = self._sizes(job.folder.name)
        for file, size in sizes.items():
            if remote.get(file) != size:
                job.sent.discard(file)
                raise OSError(f"{file} has {remote.get(file, 0):,} bytes at the URL, and {size:,} locally")
        if job.manifest() != manifest:
            job.sent.clear()
            raise OSError("the checkpoint was saved again during its upload")
        for file in remote.keys() - sizes.keys():
            self._remote.remove(f"{path}/{file}")
        self._remote.write(f"{path}/{MANIFEST}", manifest)
        if self._remote.read(f"{path}/{MANIFEST}") != manifest:
            raise OSError(f"{MANIFEST} at the URL differs from the uploaded file")
        self._infos.pop(job.folder.name, None)

    def _sizes(self, name: str) -> dict[str, int]:
        """Returns the sizes of a checkpoint's files at the URL, by name."""
        files = self._remote.files(f"{CHECKPOINTS}/{name}")
        return {file.rpartition("/")[2]: size for file, size in files.items()}

    def _upload_run_files(self) -> None:
        """Uploads the current content of the small files that have changed. They grow during training."""
        for name in (*history_files(), *_REPORT):
            path = self._run_dir / name
            if path.is_file() and not path.is_symlink():  # a link may lead to a secret
                stat = path.stat()
                if self._sent_stats.get(name) != (stat.st_mtime_ns, stat.st_size):
                    self._remote.write(name, path.read_bytes())
                    self._sent_stats[name] = (stat.st_mtime_ns, stat.st_size)

    # ----------------------------------------------------------------------------------------------- retention

    def _abandon_newer(self) -> None:
        """Renames the manifests of checkpoints after the step that the run was rewound to, once, before any upload."""
        if self._rewound_to is None:
            return
        for name, files in self._list_checkpoints().items():
            if step_of(Path(name)) > self._rewound_to and MANIFEST in files:
                path = f"{CHECKPOINTS}/{name}"
                self._remote.write(f"{path}/{_ABANDONED_MANIFEST}", self._remote.read(f"{path}/{MANIFEST}"))
                self._remote.remove(f"{path}/{MANIFEST}")
                self._event("remote_left", checkpoint=name)
        self._rewound_to = None

    def _is_kept(self, folder: Path) -> bool:
        """Returns whether the policy keeps a checkpoint at the URL: after an outage most are not worth an upload."""
        step = step_of(folder)
        if self._keep is None or all(step_of(Path(name)) < step for name in self._done):
            return True
        info = CheckpointInfo.read(step, (folder / STATE).read_bytes())
        others = [other for other in self._remote_infos(self._list_checkpoints()) if other.step != step]
        return step in self._keep([*others, info])

    def _prune(self, just: Path) -> None:
        """Removes checkpoints that the policy does not keep, and incomplete uploads that are over a day old."""
        try:
            found = self._list_checkpoints()
            if self._keep is not None:
                infos = self._remote_infos(found)
                gone = {info.step for info in infos} - set(self._keep(infos)) - {step_of(just)}
                for name in [name for name in found if step_of(Path(name)) in gone]:
                    self._remote.remove(f"{CHECKPOINTS}/{name}/{MANIFEST}")  # first: the rest is then an orphan
                    self._remote.remove_all(f"{CHECKPOINTS}/{name}")
                    self._infos.pop(name, None)
            for name, files in found.items():
                orphan = not {MANIFEST, _ABANDONED_MANIFEST} & set(files) and name not in self._jobs
                if orphan and min(self._remote.age_s(f"{CHECKPOINTS}/{name}/{file}") for file in files) > _ORPHAN_S:
                    self._remote.remove_all(f"{CHECKPOINTS}/{name}")
            same = f"{CHECKPOINTS}/{just.name}/"  # parts of an interrupted upload of this checkpoint
            self._remote.abort_uploads(CHECKPOINTS, lambda name, age_s: age_s >= _ORPHAN_S or name.startswith(same))
        except TransferStopped:
            raise
        except Exception as error:  # the checkpoint itself is uploaded
            self._event("remote_not_tidied", message=error_text(error))

    def _list_checkpoints(self) -> dict[str, list[str]]:
        """Lists the files of each checkpoint at the URL, complete or not."""
        return group_by_checkpoint(self._remote.files(CHECKPOINTS))

    def _remote_infos(self, found: dict[str, list[str]]) -> list[CheckpointInfo]:
        """Returns the policy's facts about each complete checkpoint, which keep one that cannot be read."""
        names = [name for name, files in found.items() if MANIFEST in files]
        for name in [name for name in names if name not in self._infos]:
            step = step_of(Path(name))
            try:
                self._infos[name] = CheckpointInfo.read(step, self._remote.read(f"{CHECKPOINTS}/{name}/{STATE}"))
            except (FileNotFoundError, DamagedCheckpoint):
                self._infos[name] = CheckpointInfo(step, keep=True)
        return [self._infos[name] for name in names]

    # ----------------------------------------------------------------------------------------------- reporting

    def _report_failure(self, job: _Upload | None, failure: Failure) -> None:
        if time.monotonic() - self._reported_at < _REPORT_EVERY_S:
            return
        self._reported_at = time.monotonic()
        what = "the run's files" if job is None else job.folder.name
        reason = failure.describe(self._remote.url)
        log.warning("%s cannot be uploaded to %s (%s): retrying", what, self._remote.url, reason)
        self._event("upload_failed", checkpoint=what, message=reason, lag_s=round(self.lag_s, 1))
