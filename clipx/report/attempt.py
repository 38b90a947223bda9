"""Reporting that must not end a finished run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def attempt(what: str, call: Callable[[], Result], warn: Callable[[str], None] = log.warning) -> Result | None:
    """Returns the result of `call`. If it fails, warns in one line that `what` is missing, and returns None.

    For figures, reports and tables of results that are already complete on disk.
    """
    try:
        return call()
    except Exception as error:  # of any library that draws or writes
        text = " ".join(str(error).split())
        warn(f"{what} failed ({type(error).__name__}: {text[:200]}): all other results are complete")
        return None
