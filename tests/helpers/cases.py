"""Cases of parametrized tests, most of them slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Returns all cases for `pytest.mark.parametrize`; those that are not in `kept` are marked slow.

    Raises ValueError if there is no such case.
    """
    found = list(cases)
    for case in kept:
        if case not in found:
            raise ValueError(f"{case!r} is not one of the cases {found}")
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in found]
