"""Errors that a user can act on: one line that names the value, the rule and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the commands, for the shell, SLURM and whatever restarts runs."""

    FINISHED = 0
    FAILED = 1  # an error: starting it again changes nothing before it is put right
    CONFIGURATION = 2
    IN_USE = 3  # another job works in the run directory
    WATCHDOG = 70  # no step for distributed.watchdog_s; stacks.rank*.txt in the run directory say where it stood
    NOT_SYNCED = 74  # finished, but what it uploads is not all there
    REQUEUE = 75  # stopped by a signal and saved: start it again with resume=auto
    ABORTED = 130  # by a second SIGINT, or before training began; the last checkpoint is whole


class ClipxError(Exception):
    """Something the user can put right. The entry points print it as one line and exit with `exit_code`."""

    exit_code = Exit.FAILED


class ConfigError(ClipxError):
    """A value of the run's configuration breaks a rule."""

    exit_code = Exit.CONFIGURATION


class DataError(ClipxError):
    """The data cannot be read as configured."""


class StorageError(DataError):
    """A storage failed for as long as it was tried: what it holds is unknown, and may be there another time."""


class CheckpointError(ClipxError):
    """No checkpoint can be read, or the run directory belongs to another run."""


class Locked(ClipxError):
    """Another job works in the run directory."""

    exit_code = Exit.IN_USE


class PeerLost(ClipxError):
    """Another rank is gone, or does not answer."""


class NotSynced(ClipxError):
    """The run is finished, but what it uploads is not all there."""

    exit_code = Exit.NOT_SYNCED


class Stopped(ClipxError):
    """No error: a signal stopped the run before its end, and it has saved. Raised on all ranks together."""

    exit_code = Exit.REQUEUE


def require(ok: bool, message: str) -> None:
    """Raises ConfigError(message) unless `ok`."""
    if not ok:
        raise ConfigError(message)


def with_location(error: ClipxError, location: str, keys: Iterable[str]) -> ClipxError:
    """Returns an error of the data at the key `location`, with its `keys` named there: a spec knows its group only.

    So `data.path` becomes `data.sources.NAME.path` for a source of a mixture, `evaluator.EVALUATOR.sets.NAME.path` for
    a set of an evaluator.
    """
    return type(error)(re.sub(rf"\bdata\.(?=({'|'.join(map(re.escape, keys))})\b)", f"{location}.", str(error)))
