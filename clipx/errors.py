"""Errors that a user can correct. Each message is one line with the value, the rule and the fix."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Iterable
from enum import IntEnum

_NO_THREAD = "can't start new thread|unable to start watchdog thread"
_NO_MEMORY = r"DefaultCPUAllocator|bad_alloc|failed to map segment|Cannot allocate memory"
# Numbers that only files have, with their own text: an OSError of `write` has no path, nor one of a network.
_OF_FILES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
# What libraries say of a disk in errors without its number: Rust, Arrow and torch with it, torch.save, SQLite.
_NUMBER = re.compile(r"\(os error (\d+)\)|detail: \[errno (\d+)\]|unable to .* file <.*\((\d+)\)", re.IGNORECASE)
_DISK = re.compile(
    "|".join(map(os.strerror, sorted(_OF_FILES))) + r"|unexpected pos \d+|disk I/O error|database or disk is full|"
    "attempt to write a readonly database|unable to open database file"
)
_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room, or raise the limit"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "correct its permissions"),
}
_UNCHANGED = "repeat the command: what was complete before is unchanged"


class Exit(IntEnum):
    """Exit codes of the commands, for the shell, SLURM and tools that restart runs."""

    FINISHED = 0
    """The command has finished."""

    FAILED = 1
    """Error of the data, the checkpoints, the run or another rank. A restart fails again until it is corrected."""

    CONFIGURATION = 2
    """Invalid configuration or environment, or ranks with different versions, configurations or data."""

    IN_USE = 3
    """Another job uses the run directory."""

    WATCHDOG = 70
    """No progress for `distributed.watchdog_s`. `stacks.rank*.txt` in the run directory contain the stack traces."""

    NOT_SYNCED = 74
    """The run has finished, but its uploads to `checkpoint.remote` are incomplete."""

    REQUEUE = 75
    """Stopped by a signal, after saving, or before training began. Start it again with `resume=auto`."""

    OUTPUT_CLOSED = 141
    """The reader of the output ended, as in `--help | head`. Training continues without output."""

    ABORTED = 130
    """Aborted by a second SIGINT, or by SIGINT before training began. The last checkpoint is complete."""


class ClipxError(Exception):
    """Error that the user can correct. The commands print each argument as a line and exit with `exit_code`."""

    exit_code = Exit.FAILED
    ends_abruptly = False  # ends the process without unwinding: threads of a broken process group may abort or block

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class ConfigError(ClipxError):
    """A value of the run's configuration breaks a rule."""

    exit_code = Exit.CONFIGURATION


class DataError(ClipxError):
    """The data cannot be read as configured."""


class DiskError(DataError):
    """A file cannot be written or read: the disk is full, read-only or failing, or a folder was removed."""


class OutputError(ClipxError):
    """Standard output, the result of the command, cannot be written."""


class OutputClosed(OutputError):
    """The reader of standard output has ended: no error, and nothing is printed."""

    exit_code = Exit.OUTPUT_CLOSED


class StorageError(DataError):
    """A storage failed for the whole retry time. Its content is unknown and may be available later."""


class StorageRefused(DataError):
    """A storage refuses all requests: no such bucket, no valid credentials, or another region."""

    reason: str = ""
    fix: str = ""


class CheckpointError(ClipxError):
    """No checkpoint can be read, or the run directory belongs to another run."""


class ResultError(ClipxError):
    """The run has finished, and its result breaks a limit of its configuration."""


class Locked(ClipxError):
    """Another job uses the run directory."""

    exit_code = Exit.IN_USE


class PeerLost(ClipxError):
    """Another rank has ended or does not answer."""

    ends_abruptly = True


class Exhausted(ClipxError):
    """Memory, open files or another resource is exhausted on this rank, while others may wait for it."""

    ends_abruptly = True


class NotSynced(ClipxError):
    """The run has finished, but its uploads are incomplete."""

    exit_code = Exit.NOT_SYNCED


class Stopped(ClipxError):
    """Signal, not an error: the run stopped before its end, after saving. Raised on all ranks together."""

    exit_code = Exit.REQUEUE


def require(ok: bool, message: str) -> None:
    """Raises ConfigError(message) unless `ok`."""
    if not ok:
        raise ConfigError(message)


def no_effect(given: str, reason: str, fix: str = "remove it") -> str:
    """Returns the sentence of an option that is set and does nothing: `given` as KEY=VALUE, "with OTHER=VALUE"."""
    return f"{given} has no effect {reason}: {fix}"


def without_effect(given: str, reason: str, fix: str = "remove it") -> ConfigError:
    """Returns the error of `no_effect`."""
    return ConfigError(no_effect(given, reason, fix))


def require_effect(ok: bool, given: str, reason: str, fix: str = "remove it") -> None:
    """Raises the error of `without_effect` unless `ok`."""
    if not ok:
        raise without_effect(given, reason, fix)


def disk_error(error: OSError, path: str | os.PathLike[str] | None, fix: str) -> DiskError:
    """Returns the error of a file system's failure, with the path, the reason and `fix`, which says what is safe."""
    named = path or error.filename or "a file"
    return DiskError(f"{os.fspath(named)} cannot be written ({error.strerror or error}): {fix}")


def disk_failure(error: Exception, safe: str = _UNCHANGED) -> DiskError | None:
    """Returns the error for what a file system refused, with the path, the reason and the fix; None for other errors.

    `safe`: what remains, and what continues from there.
    """
    text = str(error)
    number, path, reason = (
        getattr(error, name, None) if isinstance(error, OSError) else None for name in ("errno", "filename", "strerror")
    )
    path = os.fsdecode(path) if isinstance(path, bytes) else path
    if not isinstance(path, str) or "://" in path:  # fsspec gives a URL, open() the number of a descriptor
        path = None
    if found := _NUMBER.search(text):
        number = int(next(filter(None, found.groups())))
        reason, known = os.strerror(number), True
    elif path is not None and number is not None and reason:
        known = number != errno.ENOENT or os.sep in path  # else a program that is not installed
    elif number in {*_OF_FILES, errno.EACCES} and reason == os.strerror(number):  # not the words of a storage's library
        known = True
    else:
        shown = _DISK.search(text)
        reason, known = (shown[0] if shown else ""), shown is not None
    if not known:
        return None
    if path is None:
        named = re.search(r"['\"<](/[^'\">]+)['\">]", text)
        path = named[1] if named else "a file"
    fix = _FIXES.get(number or 0, "check the path and the disk")
    return DiskError(f"{path} cannot be read or written ({reason}): {fix}; {safe}")


def known_failure(error: Exception) -> ClipxError | None:
    """Returns the error that a user can correct for one of the system; None for others, which are faults of clipx."""
    return error if isinstance(error, ClipxError) else exhausted(error) or disk_failure(error)


def exhausted(error: Exception) -> Exhausted | None:
    """Returns the error for a call that the system refused for lack of a resource. Returns None for other errors."""
    if not isinstance(error, OSError | RuntimeError | MemoryError | ImportError):
        return None
    number, text, fewer = getattr(error, "errno", None), str(error), "lower data.workers or data.prefetch"
    if number == errno.EMFILE or re.search(r"Too many open files|\d items of ancdata", text):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        more = f"raise the limit, e.g. by ulimit -n {max(4096, 4 * most)}, or {fewer}"
        return Exhausted(f"a process needs more than the {most:,} open files that it may have: {more}")
    if isinstance(error, MemoryError) or number == errno.ENOMEM or re.search(_NO_MEMORY, text):
        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        limited = most != resource.RLIM_INFINITY
        place = f"{most / 1e9:,.1f} GB of address space that it may have" if limited else "memory that is available"
        asked = re.search(r"tried to allocate (\d+) bytes", text)
        size = f" ({int(asked[1]) / 1e6:,.1f} MB at once)" if asked else ""
        more = "raise the limit ulimit -v" if limited else "give the job more memory"
        return Exhausted(f"a process needs more than the {place}{size}: {more}, lower data.batch_size, or {fewer}")
    if re.search(_NO_THREAD, text) or (number == errno.EAGAIN and getattr(error, "filename", None) is None):
        more = "raise ulimit -u, ulimit -v or pids.max of the control group"
        return Exhausted(f"a process needs another process or thread than it may start: {more}, or lower data.workers")
    free = _free_bytes("/dev/shm")
    # A semaphore takes a page; a full disk raises the same error.
    if re.search("</torch_.*No space left", text) or (number == errno.ENOSPC and free < resource.getpagesize()):
        more = "give the machine or container more of it, e.g. with docker's --shm-size"
        return Exhausted(
            f"processes need more shared memory than /dev/shm has ({free:,} bytes left): {more}, or {fewer}"
        )
    return None


def _free_bytes(folder: str) -> int:
    """Returns the free bytes of the file system of a folder; 0 if it has none."""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
    return 0


def with_location(error: ClipxError, location: str, keys: Iterable[str]) -> ClipxError:
    """Returns a copy of an error of a data option that is at the key `location`, with the full names of its `keys`:
    `data.path` becomes `data.sources.NAME.path` for a source of a mixture."""
    return type(error)(re.sub(rf"\bdata\.(?=({'|'.join(map(re.escape, keys))})\b)", f"{location}.", str(error)))
