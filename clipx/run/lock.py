"""One job at a time in a run directory: a file that its holder keeps fresh, and that outlives no holder for long."""

from __future__ import annotations

import contextlib
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

from clipx.distributed.comm import Comm
from clipx.errors import Locked
from clipx.storage.local import made

log = logging.getLogger(__name__)

LOCK = "run.lock"
_REFRESH_S = 30.0
_STALE_S = 600.0  # not refreshed for so long, a lock of another machine is one of a dead job
_BUSY_S = 10.0  # another job's look at the lock takes milliseconds


@dataclass(frozen=True, slots=True)
class Holder:
    """What run.lock says: which process on which machine, in which job."""

    id: str  # of this lock, unlike any other
    host: str
    pid: int
    born: str  # when the process started, in the kernel's ticks: numbers of processes are used again
    machine: str  # this boot of it, and the processes' namespace
    job: str  # SLURM's number and restart, or nothing
    started: str

    @classmethod
    def me(cls) -> Holder:
        job = os.environ.get("SLURM_JOB_ID", "")
        return cls(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            born=_state(os.getpid())[1],
            machine=_machine(),
            job=f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else "",
            started=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def is_process(self, other: Holder) -> bool:
        return (self.machine, self.pid, self.born) == (other.machine, other.pid, other.born)

    @property
    def alive(self) -> bool | None:
        """Whether its process runs; None on another machine, which cannot tell."""
        return _runs(self) if self.machine == _machine() else None

    def __str__(self) -> str:
        job = f", SLURM job {self.job.partition('.')[0]}" if self.job else ""
        return f"pid {self.pid} on {self.host}{job}, since {self.started}"


def holder_of(run_dir: Path) -> Holder | None:
    """Who works in a run directory, or did when it was killed. None where nobody does, or who does cannot be read."""
    return _read(run_dir / LOCK)


class RunLock:
    """`run.lock` in a run directory, taken by rank 0 for all.

    A lock is stale, and is taken over with `event("lock_taken_over", ...)`, where its process is dead on this machine,
    where this is its own SLURM job started anew, or where a job on another machine did not refresh it for 10 minutes.
    """

    def __init__(self, run_dir: Path, comm: Comm, event: Callable[..., None]) -> None:
        self.path = run_dir / LOCK
        self._comm, self._event = comm, event
        self._me = Holder.me()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = False

    def take(self) -> None:
        """Makes the directory this job's until `release`. Raises Locked, on all ranks, which names the holder."""
        self._comm.on_main(self._take)

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
        self._over.set()
        self._thread.join(_BUSY_S)
        self._thread = None
        with contextlib.suppress(OSError, Locked), self._alone():
            if _read(self.path) == self._me:
                self.path.unlink()

    def __enter__(self) -> RunLock:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self) -> None:
        made(self.path.parent, f"run_dir={self.path.parent}", "give")
        with self._alone():
            new = self.path.with_name(f"run.lock.{self._me.id}")
            try:
                new.write_text(self._text(), encoding="utf-8")  # whole before it is seen, and dated by the file system
                if self.path.exists():
                    self._judge(_read(self.path), new.stat().st_mtime - self.path.stat().st_mtime)
                new.replace(self.path)
            finally:
                new.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._refresh, name="run.lock", daemon=True)
        self._thread.start()

    def _judge(self, holder: Holder | None, age_s: float) -> None:
        """Raises Locked where the lock that is there is alive."""
        if holder is not None and holder.is_process(self._me):
            return  # of an earlier trainer of this process
        if not _stale(holder, age_s, self._me):
            raise Locked(
                f"{self.path.parent} is in use by {holder or 'a job that cannot be read'}: wait for its end, or give "
                f"this run another name=; if that job is dead for sure, delete {self.path}"
            )
        log.warning("took over the run.lock of %s, which is gone", holder or "an unknown job")
        self._event("lock_taken_over", of=asdict(holder) if holder else None, silent_s=round(age_s))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else may change the lock meanwhile: a second file, created exclusively, there for milliseconds."""
        guard = self.path.with_name("run.lock.guard")
        start = time.monotonic()
        while not _create(guard, self._text()):
            if time.monotonic() - start > _BUSY_S:
                raise Locked(f"{guard} is left from a job that was killed just then ({_read(guard)}): delete it")
            time.sleep(0.02)
        try:
            yield
        finally:
            guard.unlink(missing_ok=True)

    def _refresh(self) -> None:
        while not self._over.wait(_REFRESH_S):
            with contextlib.suppress(OSError):  # a file system that is away for a while
                holder = _read(self.path)
                if holder is not None and holder.id != self._me.id:
                    self._lost = True
                    return
                os.utime(self.path)

    def _text(self) -> str:
        return json.dumps(asdict(self._me)) + "\n"


def _stale(holder: Holder | None, age_s: float, me: Holder) -> bool:
    if holder is not None:
        number, _, restart = holder.job.partition(".")
        if number and number == me.job.partition(".")[0] and restart != me.job.partition(".")[2]:
            return True  # SLURM starts a job anew when it has ended
        if holder.machine == me.machine:
            return not _runs(holder)
    return age_s > _STALE_S


def _runs(holder: Holder) -> bool:
    """Of a holder on this machine: whether it is the process of that number still."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    state, born = _state(holder.pid)
    return state != "Z" and born in (holder.born, "")


def _state(pid: int) -> tuple[str, str]:
    """(state, start) of a process as the kernel says them, ("", "") where it does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before may hold anything
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _create(path: Path, text: str) -> bool:
    """Writes a file where there is none: of several that try at once, one."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
