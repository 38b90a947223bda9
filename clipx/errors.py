"""Errors that a user can correct. Each message is one line with the value, the rule and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum


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


class OutOfMemory(ClipxError):
    """The memory of the device or of the host is exhausted on this rank, while others may wait for it."""

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


def with_location(error: ClipxError, location: str, keys: Iterable[str]) -> ClipxError:
    """Returns a copy of an error of a data option that is at the key `location`, with the full names of its `keys`.

    A spec knows only its group: `data.path` becomes `data.sources.NAME.path` for a source of a mixture,
    `evaluator.EVALUATOR.sets.NAME.path` for a data set of an evaluator.
    """
    return type(error)(re.sub(rf"\bdata\.(?=({'|'.join(map(re.escape, keys))})\b)", f"{location}.", str(error)))
