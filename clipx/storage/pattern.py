"""Patterns of file names, perhaps of strangers: their size before they are expanded, and matches in linear time."""

from __future__ import annotations

import re
from collections.abc import Callable

from clipx.errors import ConfigError, require

_LONGEST = 4096  # characters, the longest path of Linux
_MOST_NAMES = 1 << 20  # of an option; LAION-5B has 230,000 shards
_MOST_LISTED = 10_000  # with a *: each lists a folder
_MOST_CHARACTERS = 1 << 28  # of the names of a pattern
_DEEPEST = 16  # braces within braces
_RANGE = re.compile(r"(?:(-?\d+)\.\.(-?\d+)|([A-Za-z])\.\.([A-Za-z]))(?:\.\.-?(\d+))?")


def check_length(pattern: str, key: str) -> None:
    """Raises ConfigError for more characters than a path has, before anything looks for braces and secrets in them."""
    length = len(pattern)
    require(length <= _LONGEST, f"{key}={pattern[:60]}… has {length:,} characters: a path has at most {_LONGEST:,}")


def expanded(pattern: str, key: str, have: int = 0) -> list[str]:
    """Returns what a pattern with braces stands for, `{0000..0123}` or `{a,b}`. Raises ConfigError for an invalid one.

    `key`: the option, for errors; `have`: the number of names that it has before. Names are counted before any is made.
    """
    from braceexpand import braceexpand

    most = _MOST_LISTED if "*" in pattern else _MOST_CHARACTERS // max(1, len(pattern))
    most = max(0, min(most, _MOST_NAMES - have))
    named = f"{key}={pattern}"
    require(_count(pattern, named) <= most, f"{named} stands for more than {most:,} names: correct its braces")
    try:
        return list(braceexpand(pattern))
    except ValueError as error:
        raise ConfigError(f"{named} is not a valid pattern ({error}): write {{0000..0123}} for a range") from None


def _count(pattern: str, named: str) -> int:
    """Returns the number of names that a pattern with balanced braces stands for, and at least 1 for others."""
    sums, products, starts = [0], [1], [0]  # of each open brace: alternatives before, names of the present one
    skip = False
    for at, character in enumerate(pattern):
        if skip or character == "\\":
            skip = not skip
        elif character == "{":
            require(len(starts) <= _DEEPEST, f"{named} has braces within braces, more than {_DEEPEST}: write it flat")
            for stack, first in ((sums, 0), (products, 1), (starts, at + 1)):
                stack.append(first)
        elif character == "," and len(starts) > 1:
            sums[-1] += products[-1]
            products[-1] = 1
        elif character == "}" and len(starts) > 1:
            names = _range_size(pattern[starts.pop() : at]) or sums[-1] + products[-1]
            sums.pop(), products.pop()
            products[-1] *= names
    total = 1
    for before, names in zip(sums, products, strict=True):
        total *= before + names
    return total


def _range_size(text: str) -> int:
    """Returns the number of names of a range. 0: it is none."""
    from braceexpand import alphabet

    if (found := _RANGE.fullmatch(text)) is None:
        return 0
    low, high, first, last, step = found.groups()
    distance = int(high) - int(low) if high else alphabet.index(last) - alphabet.index(first)
    return abs(distance) // (int(step or 1) or 1) + 1


def wider(pattern: str) -> str:
    """Returns a pattern that matches at least as much, and that fsspec's glob tests in linear time: see `matcher`."""
    before, folders, _ = pattern.partition("**")
    names = [re.sub(r"[*[].*", "*", name) if name.count("*") > 1 else name for name in before.split("/")]
    return "/".join(names) + folders


def matcher(pattern: str) -> Callable[[str], bool]:
    """Returns a function that tests a path as fsspec's glob does, in time linear in both for each `**`.

    * matches in a name, ** any folders. fsspec's regular expression is exponential in the number of both.
    """
    names = [None if name == "**" else _name(name) for name in pattern.split("/")]
    last = names.pop()

    def matches(path: str) -> bool:
        *folders, file = path.split("/")
        reached = {0}  # numbers of folders of the path that the pattern up to here has matched
        for name in names:
            if name is None:
                reached = set(range(min(reached), len(folders) + 1))
            else:
                reached = {at + 1 for at in reached if at < len(folders) and name(folders[at])}
            if not reached:
                return False
        return last is None or (len(folders) in reached and last(file))

    return matches


def _name(pattern: str) -> Callable[[str], bool]:
    """Returns a function that tests a name: fnmatch's, whose regular expression does not go back before a *."""
    from fnmatch import translate

    test = re.compile(translate(pattern)).match
    return lambda name: test(name) is not None and (pattern != "*" or bool(name))
