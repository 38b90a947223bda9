"""Weights at a URL come into the cache, once for all processes of a host."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

from clipx.checkpoint.downloader import RETRY_S, fetch, remote_checkpoints
from clipx.checkpoint.resume import CHECKPOINTS, is_checkpoint
from clipx.errors import CheckpointError
from clipx.storage.local import cache_folder
from clipx.storage.remote import download, errors_as, file_system, retry


def fetched(url: str) -> Path:
    """`fetched_folder` for one file."""
    folder, _, name = url.rpartition("/")
    return fetched_folder(folder, [name]) / name


def fetched_folder(url: str, names: Sequence[str]) -> Path:
    """A folder of the cache with these files of the one at `url`. Kept until somebody deletes it; where one of them is
    another file by now, that is another folder.

    Raises CheckpointError where one is not there or comes shorter than it is, StorageError in an outage.
    """
    places = [f"{url}/{name}" for name in names]
    asked = []
    for place in places:
        with _looking(place):
            asked.append(retry(place, RETRY_S, partial(_asked, place)))
    folder = cache_folder("weights") / _digest(
        url, *(f"{name} {said}" for name, said in zip(names, asked, strict=True))
    )
    folder.mkdir(exist_ok=True)
    with _alone(folder):
        for place, name, (size, _) in zip(places, names, asked, strict=True):
            if not (folder / name).exists():
                _download(place, folder / name, size)
    return folder


def _asked(url: str) -> tuple[int, str]:
    """(bytes, a key of the content, as far as the storage has one)"""
    fs, place = file_system(url)
    fs.invalidate_cache()
    return int(fs.info(place)["size"]), str(fs.ukey(place))


def _download(url: str, path: Path, size: int) -> None:
    part = path.with_name(f".{path.name}.{uuid4().hex[:12]}")
    try:
        with _looking(url):
            download(url, part, size, RETRY_S)
        if part.stat().st_size != size:
            raise CheckpointError(f"{url} came with {part.stat().st_size:,} of its {size:,} bytes: try again")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def files_at(url: str) -> set[str]:
    """The names of what lies directly under a URL; none where that is no folder."""

    def call() -> set[str]:
        fs, place = file_system(url)
        fs.invalidate_cache()
        return {entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(place, detail=False)}

    try:
        with errors_as(lambda said: CheckpointError(f"{url} cannot be listed ({said})"), FileNotFoundError):
            return retry(url, RETRY_S, call)
    except FileNotFoundError:
        return set()


def fetched_checkpoint(url: str) -> Path:
    """A checkpoint of a run at `url`, or the newest where `url` is the run: in the cache, its hashes compared."""
    place = url.rstrip("/")
    if not is_checkpoint(place.rpartition("/")[2]):
        found = remote_checkpoints(place)
        if not found:
            raise CheckpointError(f"{url} holds no checkpoint and no weights: check the URL")
        place = found[0][1]
    run = place.rpartition(f"/{CHECKPOINTS}/")[0]
    folder = cache_folder("weights") / _digest(run) / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        path = folder / place.rpartition("/")[2]
        return path if path.exists() else fetch(place, folder)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of the processes of a host, and of a shared file system where it has locks, one at a time."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _looking(url: str) -> AbstractContextManager[None]:
    fix = "check the URL, and that the credentials allow reading"
    return errors_as(lambda said: CheckpointError(f"model.weights={url} cannot be read ({said}): {fix}"))
