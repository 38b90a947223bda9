"""Suggestions for names that do not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Returns ` (did you mean NAME?)` with the known names that `name` spells otherwise, begins, or resembles.

    Empty: there is none.
    """
    same = [other for other in known if letters_of(other) == letters_of(name)]
    longer = sorted(other for other in known if len(name) > 2 and other.startswith(name))
    close = same or (longer if 0 < len(longer) <= 3 else difflib.get_close_matches(name, known, n=1, cutoff=0.7))
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def letters_of(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()
