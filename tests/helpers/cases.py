"""Cases of parametrized tests, most of them slow; errors of the cases of a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from clipx.errors import ClipxError


def slow_except(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Returns all cases for `pytest.mark.parametrize`; those that are not in `kept` are marked slow.

    Raises ValueError if there is no such case.
    """
    found = list(cases)
    for case in kept:
        if case not in found:
            raise ValueError(f"{case!r} is not one of the cases {found}")
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in found]


def refusal(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """Returns the class and the message of the error by which clipx refuses a call, or "no error"."""
    try:
        call(*args, **options)
    except ClipxError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
