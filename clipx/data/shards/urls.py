"""Expands patterns of shards into URLs: paths, brace ranges, globs, list files, and several of them joined by `::`."""

from __future__ import annotations

import glob
import os
from collections import Counter
from pathlib import Path

from clipx.data.image_files import is_hidden
from clipx.errors import ConfigError, DataError, require
from clipx.storage.files import errors_as, filled_lines, is_local, local_path, read_file
from clipx.storage.hub_repository import HubFile
from clipx.storage.pattern import check_length, expanded, matcher, wider
from clipx.storage.remote import ask, file_system, retry
from clipx.storage.safe_json import read_regular
from clipx.storage.url import check_url

_RETRY_S = 30.0  # seconds of retries of a listing; short, because a user waits for it at the start of a run


def expand(pattern: str, key: str, what: str = "shard") -> list[str]:
    """Returns the URLs that a pattern, the value of the option `key`, matches, in order. `what`: noun of a match.

    Parts are joined by `::`. `@list.txt` is a file with one part per line; paths in it are relative to its folder.
    Raises ConfigError if a part of the pattern matches nothing or if a match repeats.
    """
    urls: list[str] = []
    for part in filter(None, map(str.strip, pattern.split("::"))):
        urls += _part(part, key, what, len(urls))
    require(bool(urls), f"{key}={pattern} names no {what}: give paths or quoted patterns")
    repeated = [url for url, count in Counter(urls).items() if count > 1] if len(set(urls)) < len(urls) else []
    require(not repeated, f"{key}={pattern} names {', '.join(repeated[:3])} more than once: name each {what} once")
    return urls


def first_local(pattern: str | None, key: str, what: str = "shard") -> list[str]:
    """Returns the first path of a pattern that names no URL, nothing of another. Raises as `expand`."""
    if pattern is None or "://" in pattern:
        return []
    lists = [part for part in map(str.strip, pattern.split("::")) if part.startswith("@")]
    for part in lists:
        _lines(part[1:], key)
    return [] if lists else expand(pattern, key, what)[:1]


def _part(part: str, key: str, what: str, have: int) -> list[str]:
    """Returns the URLs of a part. `have`: number of those before it."""
    check_length(part, key)
    check_url(key, part.removeprefix("@"))
    urls: list[str] = []
    if part.startswith("@"):
        for line in _lines(part[1:], key):
            urls += _part(line, f"{key}={part}", what, have + len(urls))
        return urls
    for pattern in expanded(part, key, have):
        found = _glob(pattern)
        require(bool(found), f"{key}={pattern} matches no {what}: check the path, and quote braces and * in the shell")
        urls += found
    return urls


def _lines(url: str, key: str) -> list[str]:
    """Returns the lines of a list file. Skips empty lines and lines that start with #."""
    named, fix = f"{key}=@{url} cannot be read", "give a text file with one URL per line"
    with errors_as(ConfigError, named, fix):
        content = read_regular(Path(local_path(url))) if is_local(url) else read_file(url, _RETRY_S)
    try:
        found = filled_lines(content)
    except ValueError as error:
        raise ConfigError(f"{named} ({error}): {fix}") from None
    found = [line for line in found if not line.startswith("#")]
    require(bool(found), f"{key}=@{url} is empty: write one path or URL per line")
    for line in found:
        require(not line.startswith("@"), f"{key}=@{url} names another list, {line}: write all URLs into one list")
    folder = url.rpartition("/")[0] + "/" if "/" in url else ""
    return [line if "://" in line or line.startswith(("/", "~")) else folder + line for line in found]


def _glob(url: str) -> list[str]:
    if "://" not in url:
        path = os.path.expanduser(url)  # noqa: PTH111
        return sorted(glob.glob(path)) if glob.has_magic(path) and not Path(path).exists() else [path]  # noqa: PTH207
    if "*" not in url:  # ? is not tested: it may begin the query of a URL
        return [url]

    hub = HubFile.parse(url)

    def call() -> list[str]:
        if hub is not None:
            tests, root = matcher(hub.path), url.removesuffix(hub.path)
            found = [path for path in hub.files() if tests(path) and (is_hidden(hub.path) or not is_hidden(path))]
            return sorted(root + path for path in found)
        fs, path = file_system(url)
        tests = matcher(path)
        # Without hidden files, as in a shell.
        found = [one for one in ask(url, "glob", wider(path)) if tests(one) and (is_hidden(path) or not is_hidden(one))]
        if not found:  # glob is silent about a missing bucket, which this raises
            ask(url, "ls", path.partition("*")[0].rpartition("/")[0])
        return sorted(map(fs.unstrip_protocol, found))

    fix = "check the path" if is_local(url) else "check the URL and the credentials"
    try:
        with errors_as(DataError, f"{url} cannot be listed", fix, FileNotFoundError):
            return retry(url, _RETRY_S, call)
    except FileNotFoundError:
        return []
