"""Checks of the words that a user typed on a command line, before Hydra reads them."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence

from clipx.compat import flags_of
from clipx.config.other_trainers import OtherTrainer, other_trainers
from clipx.config.suggestions import did_you_mean
from clipx.errors import ConfigError

_OVERRIDE = re.compile(r"(?:~|\+{0,2})([^=\s+~-][^=\s]*)=|~([^=\s]+)$")


def override_key(word: str) -> str | None:
    """Returns the key of an override, without + or ~. None: the word is none.

    The choice of a group and a key of it are different keys: `model=tiny` and `model.name=a`; so are two packages of a
    group: `+data@data.sources.a=csv` and `+data@data.sources.b=csv`.
    """
    found = None if word.startswith("-") else _OVERRIDE.match(word)
    return None if found is None else found[1] or found[2]


def last_of_each(words: Sequence[str]) -> list[str]:
    """Returns the words with one override for each key: the last one, in the place of the first.

    For callers that append overrides to common ones.
    """
    last: dict[object, str] = {}
    for i, word in enumerate(words):
        last[override_key(word) or i] = word
    return list(last.values())


def check_typed(
    words: Sequence[str],
    parser: argparse.ArgumentParser,
    translated: Callable[[OtherTrainer, Sequence[str]], str] | None = None,
) -> None:
    """Raises ConfigError for flags that do not exist, such as open_clip's, and for a key or a flag given twice.

    `translated` returns the message for words with flags of another trainer; it receives the flags that exist.
    """
    flags = flags_of(parser)
    seen: dict[str, list[str]] = {}
    for word in words:
        name = word.partition("=")[0]
        if not word.startswith("-"):
            name = override_key(word) or ""
        elif name in flags:
            name = flags[name].dest if flags[name].nargs != 0 else ""  # flags without a value may be repeated
        elif word.startswith("--") and not any(flag.startswith(name) for flag in flags):
            for trainer in other_trainers():
                if any(map(trainer.is_flag, words)):
                    answer = translated or (lambda of, known: of.answer(words, known, "train", ("python", "-m"), 1))
                    raise ConfigError(answer(trainer, list(flags)))
            raise ConfigError(_unknown_flag(name, list(flags)))
        if name:
            seen.setdefault(name, []).append(word)
    for name, given in seen.items():
        if len(given) > 1:
            raise ConfigError(_repeated(name, given))


def _unknown_flag(flag: str, known: Sequence[str]) -> str:
    hint = did_you_mean(flag, known)
    others = " or ".join(trainer.name for trainer in other_trainers())
    rule = f"{flag} is neither a flag of this command nor of {others}{hint}" if others else f"{flag} is no flag{hint}"
    return f"{rule}: options are written key=value, --hydra-help lists the flags"


def _repeated(name: str, given: Sequence[str]) -> str:
    times = "twice" if len(given) == 2 else f"{len(given)} times"
    if given[0].startswith("-"):
        return f"{given[0].partition('=')[0]} is given {times}, and Hydra reads one: give it once"
    values = [word.partition("=")[2] for word in given]
    rule = f"{name} is given {times}, as {_short(given[0])} and {_short(given[-1])}"
    pattern = _pattern(values)
    if pattern is not None:
        return f"{rule}: if the shell expanded braces, quote them: {name}='{pattern}'"
    return f"{rule}: give it once; a list is {name}=[a,b], a sweep {name}=a,b with -m"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def _pattern(values: Sequence[str]) -> str | None:
    """Returns the brace pattern that a shell expands to these values, perhaps another than was typed. None: none."""
    before = os.path.commonprefix(values)  # noqa: RUF071  # characters, not folders
    after = os.path.commonprefix([value[len(before) :][::-1] for value in values])[::-1]  # noqa: RUF071
    parts = [value[len(before) : len(value) - len(after)] for value in values]
    if not (before + after) or len(set(parts)) < len(parts) or not all(parts) or "/" not in before + after:
        return None
    numbers = [int(part) for part in parts if part.isdecimal()]
    consecutive = numbers == list(range(numbers[0], numbers[0] + len(parts))) if numbers else False
    inside = f"{parts[0]}..{parts[-1]}" if consecutive else _short(",".join(parts))
    return f"{before}{{{inside}}}{after}"
