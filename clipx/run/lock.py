"""Lock file of a run directory, for one job at a time. Its heartbeat shows when the lock of a dead job is stale."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from clipx.errors import Locked, disk_error
from clipx.processes import is_running, process_stat
from clipx.storage.local import ensure_folder
from clipx.storage.safe_json import read_as, read_regular

log = logging.getLogger(__name__)

LOCK = "run.lock"
_GUARD = "run.lock.guard"
_HEARTBEAT_S = 30.0
_STALE_S = 600.0  # a lock of another machine without a heartbeat for this time is stale
_GUARD_S = 10.0  # longest wait for the guard, which a job normally holds for milliseconds
_ADVICE = "wait until it ends, or give this run another name="
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # from Lustre without -o flock, NFS without lockd, others


@dataclass(frozen=True, slots=True)
class Holder:
    """Contents of run.lock: process, machine and job that hold the lock."""

    id: str  # unique to this lock
    host: str
    pid: int
    born: str  # start time of the process in kernel ticks, because pids are reused
    machine: str  # boot id and pid namespace
    job: str  # SLURM's job as squeue shows it and its restart count: 123_4.0, or empty
    started: str

    @classmethod
    def current(cls) -> Holder:
        job = _slurm_job()
        return cls(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            born=process_stat(os.getpid()).born,
            machine=_machine_id(),
            job=f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else "",
            started=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    @property
    def alive(self) -> bool | None:
        """True if the process runs, None if unknown because it is on another machine."""
        return is_running(self.pid, self.born) if self.machine == _machine_id() else None

    def __str__(self) -> str:
        job = f", SLURM job {self.job.partition('.')[0]}" if self.job else ""
        return f"pid {self.pid} on {self.host}{job}, since {self.started}"


def _slurm_job() -> str:
    """Returns the SLURM job of this process as squeue shows it: 123, or 123_4 for a task of an array. Empty: no job."""
    if task := os.environ.get("SLURM_ARRAY_TASK_ID"):
        return f"{os.environ.get('SLURM_ARRAY_JOB_ID')}_{task}"
    return os.environ.get("SLURM_JOB_ID", "")


def read_holder(run_dir: Path) -> Holder | None:
    """Returns the holder of a run directory's lock, alive or dead, or None without a complete lock of this version."""
    try:
        return read_as(Holder, read_regular(run_dir / LOCK))
    except (OSError, ValueError):
        return None


class RunLock:
    """Lock `run.lock` of a run directory, which rank 0 acquires for all ranks, or of the launcher's folder of a sweep.

    `advice` is the fix that the error of a second job names. A stale lock is taken over with
    `event("lock_taken_over", ...)`: its process is dead on this machine, SLURM has restarted its job as this one, or a
    job on another machine did not refresh it for 10 minutes.
    """

    def __init__(self, folder: Path, event: Callable[..., None], advice: str = _ADVICE) -> None:
        self.path = folder / LOCK
        self._event, self._advice = event, advice
        self._holder = Holder.current()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = False

    def acquire(self) -> None:
        """Locks the directory until `release`. Raises Locked, naming the holder."""
        ensure_folder(self.path.parent, f"run_dir={self.path.parent}", "give")
        with self._guard():
            new = self.path.with_name(f"run.lock.{self._holder.id}")
            try:  # replaced atomically, and its time is the file system's
                with new.open("x", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(self._holder)) + "\n")
                if self.path.exists():
                    self._check_stale(read_holder(self.path.parent), new.stat().st_mtime - self.path.stat().st_mtime)
                new.replace(self.path)
            except OSError as error:
                raise disk_error(error, self.path, "make room, or use another folder") from None
            finally:
                new.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._keep_alive, name="run.lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises Locked on rank 0 if another job took the lock over, for example after this job was suspended."""
        if self._lost:
            raise Locked(
                f"{self.path} was taken over by another job, because this job did not refresh it for "
                f"{_STALE_S / 60:.0f} minutes: this job ends, the other one continues the run"
            )

    @property
    def is_held(self) -> bool:
        """True if the file names this job. A job that was suspended may have lost its lock to another."""
        return read_holder(self.path.parent) == self._holder

    def release(self) -> None:
        """Removes the lock if this job still holds it. A second call does nothing."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(_GUARD_S)
        self._thread = None
        if not self.path.exists():
            return  # with its directory, which the guard would create again
        with contextlib.suppress(OSError, Locked), self._guard() as guard:
            if self.is_held:
                self.path.unlink()
                guard.unlink()  # safe while locked: filelock releases a lock on a removed file and retries

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _check_stale(self, holder: Holder | None, age_s: float) -> None:
        """Raises Locked if the existing lock is not stale."""
        me = self._holder
        if holder is not None and (holder.machine, holder.pid, holder.born) == (me.machine, me.pid, me.born):
            return  # an earlier trainer of this process
        if not _stale(holder, age_s, me):
            raise Locked(
                f"{self.path.parent} is in use by {holder or 'an unknown job'}: {self._advice}; if that job is "
                f"certainly dead, delete {self.path}"
            )
        log.info("took over the stale run.lock of %s", holder or "an unknown job")
        self._event("lock_taken_over", of=asdict(holder) if holder else None, silent_s=round(age_s))

    @contextlib.contextmanager
    def _guard(self) -> Iterator[Path]:
        """Excludes other jobs from the lock for milliseconds, by flock on a second file. Raises Locked.

        Without a flock over all hosts two jobs that start within the same milliseconds may both acquire the lock. The
        job whose file was replaced then detects this at its next heartbeat and ends.
        """
        path = self.path.with_name(_GUARD)
        guard = FileLock(path, timeout=_GUARD_S, poll_interval=0.02, fallback_to_soft=False)
        try:
            guard.acquire()
        except Timeout:
            raise Locked(
                f"{path} is held for more than {_GUARD_S:g} s by a process that was suspended while changing the lock: "
                "end that process, or use another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
        try:
            yield path
        finally:
            guard.release()

    def _keep_alive(self) -> None:
        while not self._stop.wait(_HEARTBEAT_S):
            with contextlib.suppress(OSError):  # a temporary failure of the file system
                holder = read_holder(self.path.parent)
                if holder is not None and holder.id != self._holder.id:
                    self._lost = True
                    return
                os.utime(self.path)


def _stale(holder: Holder | None, age_s: float, me: Holder) -> bool:
    if holder is not None:
        number, _, restart = holder.job.partition(".")
        if number and number == me.job.partition(".")[0] and restart != me.job.partition(".")[2]:
            return True  # SLURM restarts a job only after it has ended
        if (alive := holder.alive) is not None:
            return not alive
    return age_s > _STALE_S


def _machine_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()
