"""The lock of a run directory, for one job at a time: a file with a heartbeat, by which a dead job's lock is stale."""

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

from clipx.distributed.comm import Comm
from clipx.errors import Locked
from clipx.storage.local import ensure_folder

log = logging.getLogger(__name__)

LOCK = "run.lock"
_GUARD = "run.lock.guard"
_HEARTBEAT_S = 30.0
_STALE_S = 600.0  # without a heartbeat for so long, a lock of another machine is a dead job's
_GUARD_S = 10.0  # that another job may hold the guard, which takes it milliseconds
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of Lustre without -o flock, NFS without lockd, others


@dataclass(frozen=True, slots=True)
class Holder:
    """The contents of run.lock: which process on which machine, in which job."""

    id: str  # of this lock, unlike any other
    host: str
    pid: int
    born: str  # when the process started, in the kernel's ticks: numbers of processes are used again
    machine: str  # this boot of it, and the processes' namespace
    job: str  # SLURM's number and restart, or nothing
    started: str

    @classmethod
    def current(cls) -> Holder:
        job = os.environ.get("SLURM_JOB_ID", "")
        return cls(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            born=_process_stat(os.getpid())[1],
            machine=_machine_id(),
            job=f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else "",
            started=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def is_process(self, other: Holder) -> bool:
        return (self.machine, self.pid, self.born) == (other.machine, other.pid, other.born)

    @property
    def alive(self) -> bool | None:
        """Whether its process runs; None on another machine, where that is unknown."""
        return _is_running(self) if self.machine == _machine_id() else None

    def __str__(self) -> str:
        job = f", SLURM job {self.job.partition('.')[0]}" if self.job else ""
        return f"pid {self.pid} on {self.host}{job}, since {self.started}"


def read_holder(run_dir: Path) -> Holder | None:
    """Returns the holder of a run directory, alive or killed; None where there is none, or it cannot be read."""
    try:
        return Holder(**json.loads((run_dir / LOCK).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


class RunLock:
    """`run.lock` in a run directory, taken by rank 0 for all.

    A lock is stale, and is taken over with `event("lock_taken_over", ...)`, where its process is dead on this machine,
    where this is its own SLURM job started anew, or where a job on another machine did not refresh it for 10 minutes.
    """

    def __init__(self, run_dir: Path, comm: Comm, event: Callable[..., None]) -> None:
        self.path = run_dir / LOCK
        self._comm, self._event = comm, event
        self._holder = Holder.current()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = False

    def acquire(self) -> None:
        """Makes the directory this job's until `release`. Raises Locked, on all ranks, which names the holder."""
        self._comm.run_on_main(self._acquire)

    def check(self) -> None:
        """Raises Locked on rank 0 where another job took the lock over, as of a job that was frozen for long."""
        if self._lost:
            raise Locked(
                f"{self.path} is no longer this job's: not refreshed for {_STALE_S / 60:.0f} minutes, it was taken "
                "over by another, which goes on with the run; this one ends"
            )

    def release(self) -> None:
        """Gives the directory back, if it is this job's. A second call does nothing."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(_GUARD_S)
        self._thread = None
        with contextlib.suppress(OSError, Locked), self._guard() as guard:
            if read_holder(self.path.parent) == self._holder:
                self.path.unlink()
                guard.unlink()  # while it is locked: filelock drops a lock that it gets on a removed file, and retries

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _acquire(self) -> None:
        ensure_folder(self.path.parent, f"run_dir={self.path.parent}", "give")
        with self._guard():
            new = self.path.with_name(f"run.lock.{self._holder.id}")
            try:  # whole before it is seen, and dated by the file system
                new.write_text(json.dumps(asdict(self._holder)) + "\n", encoding="utf-8")
                if self.path.exists():
                    self._check_stale(read_holder(self.path.parent), new.stat().st_mtime - self.path.stat().st_mtime)
                new.replace(self.path)
            finally:
                new.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._keep_alive, name="run.lock", daemon=True)
        self._thread.start()

    def _check_stale(self, holder: Holder | None, age_s: float) -> None:
        """Raises Locked where the lock that is there is alive."""
        if holder is not None and holder.is_process(self._holder):
            return  # of an earlier trainer of this process
        if not _stale(holder, age_s, self._holder):
            raise Locked(
                f"{self.path.parent} is in use by {holder or 'a job that cannot be read'}: wait for its end, or give "
                f"this run another name=; if that job is dead for sure, delete {self.path}"
            )
        log.warning("took over the run.lock of %s, which is gone", holder or "an unknown job")
        self._event("lock_taken_over", of=asdict(holder) if holder else None, silent_s=round(age_s))

    @contextlib.contextmanager
    def _guard(self) -> Iterator[Path]:
        """Keeps other jobs from reading and changing the lock meanwhile, for milliseconds: flock on a second file.

        The kernel, or the file server, frees it when its process is killed. Where the file system has no flock, or one
        for each host, two jobs that start within the same milliseconds may both get the lock: the heartbeat of the one
        whose file was replaced finds that out, and ends it.
        """
        path = self.path.with_name(_GUARD)
        guard = FileLock(path, timeout=_GUARD_S, poll_interval=0.02, fallback_to_soft=False)
        try:
            guard.acquire()
        except Timeout:
            raise Locked(
                f"{path} is held for {_GUARD_S:g} s by a process that stopped while it looked at the lock: end it, or "
                "give this run another name="
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
            with contextlib.suppress(OSError):  # a file system that is away for a while
                holder = read_holder(self.path.parent)
                if holder is not None and holder.id != self._holder.id:
                    self._lost = True
                    return
                os.utime(self.path)


def _stale(holder: Holder | None, age_s: float, me: Holder) -> bool:
    if holder is not None:
        number, _, restart = holder.job.partition(".")
        if number and number == me.job.partition(".")[0] and restart != me.job.partition(".")[2]:
            return True  # SLURM starts a job anew when it has ended
        if holder.machine == me.machine:
            return not _is_running(holder)
    return age_s > _STALE_S


def _is_running(holder: Holder) -> bool:
    """Whether the process of a holder on this machine runs, and its number is not used again."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    state, born = _process_stat(holder.pid)
    return state != "Z" and born in (holder.born, "")


def _process_stat(pid: int) -> tuple[str, str]:
    """Returns a process's state and start time from /proc; ("", "") where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before may hold anything
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _machine_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()
