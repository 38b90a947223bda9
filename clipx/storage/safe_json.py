"""Reads small files that another program may have written: regular files of limited size, JSON of declared types."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")

_LIMIT = 64 << 20  # bytes: a manifest of 100,000 files has 12 MB
_SHOWN = 60  # characters of a value in an error
_LIMITS = {  # of the sizes that a model's configuration claims, by the ends of their keys; more than any model has
    re.compile(r"(?:^|_)(?:layers|depths?|blocks)$|^n_layer$"): 1000,
    re.compile(r"(?:^|_)(?:vocab_size|n_vocab|vocabulary)$"): 1 << 23,
    re.compile(r"(?:^|_)(?:heads|experts)$|^n_head$"): 1 << 12,
    re.compile(r"(?:^|_)(?:width|(?:hidden|intermediate|embedding)_size|dims?|d_model|d_ff|d_kv|n_embd|n_inner)$"): 1
    << 18,
    re.compile(r"(?:^|_)(?:context_length|position_embeddings|n_positions|n_ctx|num_patches)$"): 1 << 24,
    re.compile(r"(?:^|_)(?:image_size|img_size|patch_size|num_channels)$|^size$"): 1 << 15,
}


def read_regular(path: Path, limit: int = _LIMIT) -> bytes:
    """Returns the content of a regular file of at most `limit` bytes, by default 64 MiB.

    Raises OSError for other files: a named pipe would block for ever, a sparse file may exceed the memory.
    """
    with open(path, "rb", opener=_open_nonblocking) as file:  # Path.open has no opener
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if found.st_size > limit:
            raise OSError(errno.EFBIG, f"{found.st_size:,} bytes, more than {limit:,}", str(path))
        return file.read(found.st_size)  # reading `limit` would allocate it


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # otherwise opening a named pipe waits for a writer


def parse_json(content: bytes | str) -> Any:
    """Returns the values of JSON text. Raises ValueError in one line, also for duplicate keys and deep nesting."""
    try:
        text = content if isinstance(content, str) else content.decode()
        values = json.loads(text, object_pairs_hook=_unique)
        if "\\u" in text:
            json.dumps(values, ensure_ascii=False).encode()  # half of a surrogate pair could not be printed or written
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"it is not UTF-8 ({error.reason})") from None
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the key {shown(name)} occurs twice")
        values[name] = value
    return values


def read_as(kind: type[T], content: bytes | str) -> T:
    """Returns JSON text as an instance of `kind`, such as a dataclass, without conversions. Other keys are ignored.

    Raises ValueError in one line that names the first value of another type.
    """
    from pydantic import ValidationError

    parse_json(content)  # pydantic takes the last of duplicate keys
    adapter: Any = _adapter(cast("Any", kind))
    try:
        found: T = adapter.validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = " ".join(first["msg"].split())
        if first["type"] in ("missing", "json_invalid"):
            raise ValueError(f"{place or 'it'}: {message}") from None
        raise ValueError(f"{place or 'it'} is {shown(first['input'])}: {message}") from None
    return found


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def check_sizes(values: Any, place: str = "") -> None:
    """Raises ValueError, in one line, for sizes that no model has: of other types, negative or huge."""
    for key, value in values.items() if isinstance(values, dict) else ():
        limit = next((limit for ends, limit in _LIMITS.items() if ends.search(key)), None)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                check_sizes(one, f"{place}{key}.")
            elif limit is not None and isinstance(one, float | int) and (type(one) is not int or not 0 <= one <= limit):
                raise ValueError(f"{place}{key}={shown(one)} must be an integer in [0, {limit}]")


def shown(value: Any) -> str:
    """Returns a value as short printable text, for an error."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
