"""Download of weights from a URL into the cache, once for all processes of a host."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from uuid import uuid4

from clipx.checkpoint.downloader import RETRY_S, fetch, fetch_files, remote_checkpoints
from clipx.checkpoint.format import discard
from clipx.checkpoint.records import MANIFEST, DamagedCheckpoint
from clipx.checkpoint.resume import CHECKPOINTS, split_checkpoint
from clipx.errors import CheckpointError, ClipxError
from clipx.escape import print_stderr
from clipx.storage.files import errors_as, read_file
from clipx.storage.local import cache_folder, open_own
from clipx.storage.remote import ask, download, file_system, retry
from clipx.weights.formats import INDEX, parts_of


def fetched(url: str) -> Path:
    """Downloads one file, as `fetched_folder` does, and returns its path."""
    folder, _, name = url.rpartition("/")
    return fetched_folder(folder, [name]) / name


def fetched_folder(url: str, names: Sequence[str]) -> Path:
    """Downloads files of the folder at `url` and returns their folder in the cache.

    The folder remains until the user deletes it. If a file at the URL has changed, a new folder is used. Raises
    CheckpointError for a missing file or an incomplete download, StorageError in an outage.
    """
    places = [f"{url}/{name}" for name in names]
    versions = []
    for place in places:
        with _read_errors(place):
            versions.append(retry(place, RETRY_S, partial(_version, place)))
    folder = cache_folder("weights") / _digest(
        url, *(f"{name} {version}" for name, version in zip(names, versions, strict=True))
    )
    folder.mkdir(exist_ok=True)
    with _locked(folder):
        for place, name, (size, _) in zip(places, names, versions, strict=True):
            if not (folder / name).exists():
                _download(place, folder / name, size)
    return folder


def fetched_model(url: str, names: Collection[str], descriptions: Sequence[str], weights: Sequence[str]) -> Path:
    """Downloads a model's folder at `url` as `fetched_folder` does: those of its files `descriptions` that are in
    `names`, and the first one of `weights`, with the files that it lists if it is an index."""
    chosen = [name for name in weights if name in names][:1]
    for index in [name for name in chosen if name.endswith(INDEX)]:
        chosen += parts_of(fetched(f"{url}/{index}"))
    return fetched_folder(url, [*(name for name in descriptions if name in names), *chosen])


def _version(url: str) -> tuple[int, str]:
    """Returns (size in bytes, key of the content if the storage has one)."""
    fs, _ = file_system(url)
    fs.invalidate_cache()
    size = ask(url, "info")["size"]
    if size is None:
        raise CheckpointError(f"{url}: its server does not tell the size of a file: use one that does")
    return int(size), str(ask(url, "ukey"))


def _download(url: str, path: Path, size: int) -> None:
    part = path.with_name(f".{path.name}.{uuid4().hex[:12]}")
    try:
        with _read_errors(url):
            download(url, part, size, RETRY_S)
        if part.stat().st_size != size:
            raise CheckpointError(f"{url}: received {part.stat().st_size:,} of {size:,} bytes: try again")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def files_at(url: str) -> set[str]:
    """Returns the names of files and folders directly under a URL. Empty if it is not a folder."""

    def call() -> set[str]:
        fs, _ = file_system(url)
        fs.invalidate_cache()
        return {entry.rstrip("/").rpartition("/")[2] for entry in ask(url, "ls", detail=False)}

    try:
        with errors_as(CheckpointError, f"model.weights={url} cannot be listed", "check the URL", FileNotFoundError):
            return retry(url, RETRY_S, call)
    except FileNotFoundError:
        return set()


def fetched_run(url: str, patterns: Sequence[str]) -> Path:
    """Downloads the files of the run at `url` whose names match, and returns the run's folder in the cache.

    Each call downloads them again, because a run in progress changes them. Raises CheckpointError and StorageError.
    """
    folder = _run_folder(url)
    names = [name for name in files_at(url) if any(fnmatchcase(name, pattern) for pattern in patterns)]
    with _locked(folder):
        gone = [path.name for pattern in patterns for path in folder.glob(pattern)]
        fetch_files(url, folder, sorted({*names, *gone}))
    return folder


def fetched_checkpoint(url: str) -> Path:
    """Downloads a checkpoint of a run at `url`, or the newest intact one if `url` is the run, and verifies its hashes.

    Returns its folder in the cache, into which it is downloaded again only if the run has replaced it. Raises
    CheckpointError for a URL without checkpoint.
    """
    run, step = split_checkpoint(url)
    found = remote_checkpoints(run)
    places = [place for number, place in found if step in (None, number)]
    if not places:
        steps = f"; available steps: {', '.join(str(number) for number, _ in found)}" if found else ""
        raise CheckpointError(f"{url} holds no checkpoint and no weights: check the URL{steps}")
    folder = _run_folder(run) / CHECKPOINTS
    folder.mkdir(exist_ok=True)
    with _locked(folder):
        for place in places:
            try:
                return _current(place, folder)
            except DamagedCheckpoint as damage:
                if place == places[-1]:
                    raise
                print_stderr(f"{damage}: falling back to the previous checkpoint")
    raise AssertionError  # unreachable: the last one returns or raises


def _current(url: str, folder: Path) -> Path:
    """Returns the copy of a checkpoint in `folder`, after replacing one that differs from that at the URL."""
    path = folder / url.rpartition("/")[2]
    if path.exists():
        with _read_errors(url):
            manifest = read_file(f"{url}/{MANIFEST}", RETRY_S)
        if (path / MANIFEST).is_file() and (path / MANIFEST).read_bytes() == manifest:
            return path
        discard(path.rename(path.with_name(f"tmp.{path.name}.{uuid4().hex[:12]}")))  # other processes keep its files
    return fetch(url, folder)


def _run_folder(url: str) -> Path:
    folder = cache_folder("weights") / _digest(url.rstrip("/"))
    folder.mkdir(exist_ok=True)
    return folder


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@contextmanager
def errors_of(key: str, instead_of: str = "model.weights") -> Iterator[None]:
    """Names the option `key` in the errors of a download, or of `load_weights`."""
    try:
        yield
    except ClipxError as error:
        raise type(error)(str(error).replace(f"{instead_of}=", f"{key}=")) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds an exclusive lock on a folder, among processes of a host, or of all hosts if the file system has locks."""
    with open_own(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_errors(url: str) -> AbstractContextManager[None]:
    fix = "check the URL, and that the credentials allow reading"
    return errors_as(CheckpointError, f"model.weights={url} cannot be read", fix)
