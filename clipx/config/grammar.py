"""Overrides as a user types them, in Hydra's grammar: quoted where it needs quotes, and how to type them in a shell."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from clipx.config.registry import LIST_GROUPS, option_files
from clipx.errors import require

# Dictionaries of other programs' keys, set without +.
FREE_KEYS = (
    "model.image.options",
    "model.text.options",
    "hydra.launcher.environment",
    "hydra.launcher.additional_parameters",
    "hydra.sweeper.sampler_args",
    "hydra.sweeper.pruner_args",
)
_STARTS = "'\"[{"  # of values that the user wrote in the grammar
_MOST = 1000  # values of an override: each takes a millisecond to read, and brackets that nest more than that
_COMMA = re.compile(r",(?![^{}]*})")  # between values, not inside a brace pattern


def hydra_override(typed: str) -> str:
    """Returns a typed override in Hydra's grammar. Raises ConfigError for one that would take many seconds to read.

    Quotes each value that the grammar does not read and that is no list, dictionary, quotation or interpolation, such
    as the path `captions (1).csv` or the pattern `/data/{0000..0123}.tar`: the shell removes the quotes that were
    typed. Expands `~` at its start, as shells do at the start of a word. Adds `++` to a key of the dictionary that
    accepts any key: without it Hydra sets existing keys only.
    """
    key, equals, value = typed.partition("=")
    if typed.startswith("-") or not equals:
        return typed
    require(
        len(re.findall(r"[\[({,]", value)) <= _MOST,
        f"{key}={value[:40]}… has more than {_MOST:,} values or brackets, too many for a command line: write them to a "
        "file, or as a pattern",
    )
    plus = "++" if f"{key}.".startswith(tuple(f"{free}." for free in FREE_KEYS)) else ""
    if not _is_readable(value) and value[0] not in _STARTS and "${" not in value:
        value = _quoted_parts(value)
    elif re.fullmatch(r"\d+(_\d+)+", value) and not plus:
        value = f"'{value}'"  # a name such as 2026_12_31, which Hydra reads as a number
    return f"{plus}{key}={value}"


def _is_readable(value: str, key: str = "key") -> bool:
    """Returns whether Hydra's grammar reads an override, or the value of one."""
    try:
        OverridesParser.create().parse_rule(f"{key}={value}", "override")
    except HydraException:
        return False
    return True


def _quoted_parts(values: str) -> str:
    return ",".join(part if _is_readable(part) else _quoted(part) for part in _COMMA.split(values))


def _quoted(text: str) -> str:
    return QuotedString(os.path.expanduser(text), Quote.single).with_quotes()  # noqa: PTH111  # as it is without ~


def in_shell(word: str) -> str:
    """Returns a word quoted for a shell. In an override, only the value is quoted."""
    key, equals, value = word.partition("=")
    if not equals or key.startswith("-"):
        return shlex.quote(word)
    quoted = f'"{value}"' if "'" in value and not re.search(r'["$`\\!]', value) else shlex.quote(value)
    return f"{shlex.quote(key) if key else ''}={quoted if value else ''}"


def unreadable(override: str) -> str:
    """Returns the message for an override that cannot be parsed, with what to type instead."""
    key, equals, value = override.partition("=")
    rule = f"{override} cannot be parsed: "
    if not equals or not key or not _is_readable("1", key):
        return f"{rule}write key=value, such as optimizer.lr=1e-3, with a key of letters, digits, _ and dots"
    right = next(found for found in _corrections(value) if _is_readable(found))
    return f"{rule}write {in_shell(f'{key}={right}')}"


def _corrections(value: str) -> Iterator[str]:
    """Yields a value closed or quoted in several ways. The last one is readable."""
    if value.startswith("[") and value.endswith("]"):
        yield f"[{_quoted_parts(value[1:-1])}]"
    yield from (value + end for end in ("]", "}", "'", '"', ")"))
    yield _quoted(value)


def ambiguous(override: str) -> str:
    """Returns the message for an override with several values outside a sweep."""
    key, _, values = override.partition("=")
    if option_files(key):
        choice = f"write {key}=[{values}]" if key in LIST_GROUPS else "choose one"
        return f"{override} names several options: {choice}, or add -m for a sweep"
    text = ",".join(part[1:-1] if part[:1] in "'\"" else part for part in _COMMA.split(values))
    as_list, as_text = in_shell(f"{key}=[{values}]"), in_shell(f"{key}={_quoted(text)}")
    return f"{override} has several values: a list is {as_list}, one value with commas {as_text}, a sweep needs -m"
