"""Errors that a user can act on: one line, naming the value, the rule and the fix."""

from __future__ import annotations


class ClipxError(Exception):
    """Something the user can put right. The entry points print it as one line and exit with `exit_code`."""

    exit_code = 1


class ConfigError(ClipxError):
    """A value of the run's configuration breaks a rule."""

    exit_code = 2


class DataError(ClipxError):
    """The data cannot be read as configured."""


class CheckpointError(ClipxError):
    """No checkpoint can be read, or the run directory belongs to another run."""


def require(ok: bool, message: str) -> None:
    """Raises ConfigError(message) unless `ok`."""
    if not ok:
        raise ConfigError(message)
