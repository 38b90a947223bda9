"""What a URL that a user gives may be, and what of it may be shown."""

from __future__ import annotations

import os
import re

from clipx.errors import require

# File systems of fsspec that stand before another one: `reference` renders templates found in a file, `filecache`
# unpickles its metadata, the rest hide which storage is read.
_WRAPPERS = (
    *("reference", "filecache", "simplecache", "blockcache", "cached", "zip", "tar", "libarchive", "dir", "generic"),
    *("asyncwrapper", "async_wrapper"),
)
_SECRETS = ("_KEY", "_SECRET", "_TOKEN", "_PASSWORD")  # ends of their names
_SECRET_CHARS = 8  # at least: a shorter value may be a word of any text
_USER = re.compile(r"://[^/\s]*@")
# Of http a user alone may be a key.
_PASSWORD = re.compile(r"(?i)(https?://|://[^/\s@]*:(?=[^/\s@]*[^/\s@:]))[^/\s@]*@")
_QUERY = re.compile(r"(://[^\s?'\"]*)\?[^\s'\"]*")


def check_url(key: str, url: str) -> None:
    """Raises ConfigError for a path or URL of the option `key` that starts a program, is a chain, or holds a secret."""
    check_secrets(key, url)
    shown = f"{key}={url}"
    require(
        not url.startswith("pipe:"),
        f"{shown} is a command, and clipx starts none: give the URL of the data itself, e.g. s3://bucket/name",
    )
    scheme = url.partition("://")[0]
    require(
        "::" not in url and ("://" not in url or scheme.lower() not in _WRAPPERS),
        f"{shown} reads a storage through another one: give the URL of the storage itself, e.g. s3://bucket/name",
    )


def check_secrets(key: str, text: str) -> None:
    """Raises ConfigError for a value of the option `key` that holds a URL with a password or a query.

    A run's configuration is saved, uploaded, and shown in reports; the names of its data are in its logs.
    """
    if "://" not in text:
        return
    shown = f"{key}={redacted(text)}"
    require(
        not _PASSWORD.search(text),
        f"{shown} was given with a password, which the run would save: leave it out, and give credentials by the "
        "environment or a profile, e.g. AWS_PROFILE",
    )
    require(
        not any(_QUERY.search(part) for part in text.split("::")),  # several joined; in a path ? is any character
        f"{shown} was given with a query, where keys would be saved: leave it out, and give credentials and options by "
        "the environment or fsspec's configuration",
    )


def check_folder_url(key: str, url: str) -> None:
    """As `check_url`; what is no URL of one folder is refused, too."""
    check_url(key, url)
    _, slashes, rest = url.partition("://")
    require(
        bool(slashes and rest),
        f"{key}={url} is no URL of a folder: give e.g. s3://bucket/runs/name, or file:///backup/name",
    )
    require(not re.search(r"[*\[\]]", url), f"{key}={url} is a pattern: give the URL of one folder")


def check_path(key: str, path: str) -> None:
    """Raises ConfigError for a URL where something is written that has to lie on this machine."""
    require("://" not in path, f"{key}={redacted(path)} is a URL: give a local path, and copy it from there")


def check_environment(key: str, text: str) -> None:
    """Raises ConfigError for a value that holds that of a secret environment variable, as ${oc.env:WANDB_API_KEY}."""
    for name, secret in os.environ.items():
        require(
            len(secret) < _SECRET_CHARS or not name.upper().endswith(_SECRETS) or secret not in text,
            f"{key} holds the value of the environment variable {name}, which the run would save: leave it out; what "
            "needs it reads the environment itself",
        )


def redacted(text: str) -> str:
    """A text without what the URLs in it hold beside their places: users, passwords, queries."""
    return _QUERY.sub(r"\1", _USER.sub("://", text)) if "://" in text else text
