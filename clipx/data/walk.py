"""Files in the folders of users, without hidden ones, also through links to folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from clipx.errors import DataError

_HIDDEN = ("__MACOSX", "@eaDir")  # copies of attributes and previews that macOS and Synology put beside the files


def is_hidden(path: str) -> bool:
    """Returns whether the last part of a path is hidden, such as .DS_Store and ._photo.jpg of macOS."""
    name = path.rpartition("/")[2]
    return name.startswith(".") or name in _HIDDEN


def walk(folder: str, key: str) -> Iterator[str]:
    """Yields the files in a folder and in those below, links among them: first the folders that are in it, then linked
    ones. `key`: name of the option, for error messages.

    Each folder is entered once, and none above `folder`: links may form a cycle. Hidden folders are not entered, hidden
    files are yielded. Raises DataError.
    """

    def fail(error: OSError) -> None:  # os.walk would leave out a folder that cannot be read
        raise DataError(f"{key}: the folder {error.filename} cannot be read ({error.strerror}): allow it, or remove it")

    place = Path(folder)
    seen = {str(above) for path in (place.absolute(), place.resolve()) for above in path.parents}
    waiting = [folder]
    for start in waiting:
        for at, folders, files in os.walk(start, onerror=fail):
            real = os.path.realpath(at)
            below = [] if real in seen else sorted(name for name in folders if not is_hidden(name))
            links = {name for name in below if os.path.islink(os.path.join(at, name))}  # noqa: PTH114,PTH118
            waiting += [os.path.join(at, name) for name in below if name in links]  # noqa: PTH118
            folders[:] = [name for name in below if name not in links]
            if real not in seen:
                yield from (os.path.join(at, name) for name in sorted(files))  # noqa: PTH118
            seen.add(real)
