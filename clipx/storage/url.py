"""Checks of URLs given by users, and their redaction for output."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from clipx.errors import require

# File systems of fsspec that wrap another one: `reference` renders templates found in a file, `filecache`
# unpickles its metadata, the rest hide which storage is read.
_WRAPPERS = frozenset(
    """reference filecache simplecache blockcache cached zip tar libarchive dir generic asyncwrapper
    async_wrapper""".split()
)
_SECRETS = re.compile(r"(?i)(?:^|_)(?:api)?(?:key|secret|token|passw(?:or)?d|passphrase|auth|cookie)s?$")
_SECRET_CHARS = 8  # minimum length: a shorter value may occur in any text
_USER = re.compile(r"://[^/\s]*@")
# In an HTTP URL a user without a password may be a key, too.
_PASSWORD = re.compile(r"(?i)https?://[^/\s@]*@|://(?=[^/\s@]*@)[^/\s@]*:[^/\s@:]")
_QUERY = re.compile(r"(://[^\s?'\"]*)\?[^\s'\"]*")


def check_url(key: str, url: str) -> None:
    """Raises ConfigError if a path or URL of the option `key` runs a program, wraps another storage or has a secret."""
    check_secrets(key, url)
    shown = f"{key}={url}"
    require(
        not url.startswith("pipe:"),
        f"{shown} is a command, which clipx does not run: give the URL of the data itself, e.g. s3://bucket/name",
    )
    scheme = url.partition("://")[0]
    require(
        "::" not in url and ("://" not in url or scheme.lower() not in _WRAPPERS),
        f"{shown} reads a storage through another one: give the URL of the storage itself, e.g. s3://bucket/name",
    )


def check_secrets(key: str, text: str) -> None:
    """Raises ConfigError if a value of the option `key` contains a URL with a password or a query.

    A run's configuration is saved, uploaded, and shown in reports; the names of its data are in its logs.
    """
    if "://" not in text:
        return
    shown = f"{key}={redacted(text)}"
    require(
        not _PASSWORD.search(text),
        f"{shown} was given with a password, which the run would save: remove it, and give credentials by the "
        "environment or a profile, e.g. AWS_PROFILE",
    )
    require(
        not any(_QUERY.search(part) for part in text.split("::")),  # several URLs joined; in a path ? is a wildcard
        f"{shown} was given with a query, whose keys the run would save: remove it, and give credentials and options "
        "by the environment or fsspec's configuration",
    )


def check_folder_url(key: str, url: str) -> None:
    """Raises ConfigError as `check_url`, and if the value is not the URL of one folder."""
    check_url(key, url)
    _, slashes, rest = url.partition("://")
    require(
        bool(slashes and rest),
        f"{key}={url} is not the URL of a folder: give e.g. s3://bucket/runs/name, or file:///backup/name",
    )
    require(not re.search(r"[*\[\]]", url), f"{key}={url} is a pattern: give the URL of one folder")


def check_path(key: str, path: str) -> None:
    """Raises ConfigError if the path of a file or folder that must be local is a URL."""
    require("://" not in path, f"{key}={redacted(path)} is a URL: give a local path, and copy between it and the URL")


def check_file(*suffixes: str) -> Callable[[str, str], None]:
    """Returns the check of an option that is the path of a local file whose name ends in one of `suffixes`."""

    def check(key: str, path: str) -> None:
        require(path.endswith(suffixes), f"{key}={path} must be a file name that ends in {', '.join(suffixes)}")
        check_path(key, path)

    return check


def from_home(key: str, text: str) -> str:
    """Returns a text with the home directory for `~` or `~user` at its start. Raises ConfigError if there is none."""
    found = os.path.expanduser(text)  # noqa: PTH111  # also of texts that are no paths
    require(
        re.match(r"~[\w.-]*(?:/|$)", text) is None or found != text,
        f"{key}={text} is in a home directory that is not known: write the path without ~, or correct the user's name",
    )
    return found


def check_environment(key: str, text: str) -> None:
    """Raises ConfigError if a value contains a secret environment variable's, as of ${oc.env:WANDB_API_KEY}."""
    for name, secret in os.environ.items():
        require(
            len(secret) < _SECRET_CHARS or secret not in text or not is_secret(name),
            f"{key} contains the value of the environment variable {name}, which the run would save: remove it; "
            "libraries read it from the environment",
        )


def is_secret(variable: str) -> bool:
    """Returns whether an environment variable is a secret by its name: KEY, TOKEN, PASSWORD etc., or *_KEY etc."""
    return _SECRETS.search(variable) is not None


def redacted(text: str) -> str:
    """Returns a text with the users, passwords and queries of its URLs removed."""
    return _QUERY.sub(r"\1", _USER.sub("://", text)) if "://" in text else text
