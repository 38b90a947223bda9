"""The copy of a run directory at a URL, for a machine that is lost: mirror.py makes it, and here it is read.

    <url>/config.yaml metrics.jsonl events.jsonl …      the small files, with each checkpoint and at the end
    <url>/checkpoints/step-00000010/…, MANIFEST.json    a checkpoint as it is on disk, its manifest last

A checkpoint counts when its manifest is there, which is written when its files have been listed with the right sizes;
it is trusted when the SHA-256 of every file has been compared.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

from clipx.checkpoint.format import MANIFEST, find_damage, sync
from clipx.checkpoint.resume import CHECKPOINTS, is_checkpoint, step_of
from clipx.errors import CheckpointError, ConfigError, require
from clipx.storage.remote import StorageFolder, download, error_text, errors_as, read_file, retry

HISTORY_FILES = ("config.yaml", "metrics.jsonl", "events.jsonl", "quarantine.jsonl")  # needed to resume elsewhere
RETRY_S = 120.0  # that a storage is waited for


def check_writable(url: str, retry_s: float = RETRY_S) -> None:
    """Writes a small file and removes it. Raises ConfigError where that cannot work, StorageError in an outage."""
    folder, name = StorageFolder(url), f".writable.{os.getpid()}"

    def call() -> None:
        folder.write(name, b"clipx")
        folder.remove(name)

    advice = "check the URL, that it exists, and that the credentials allow writing and deleting"
    with errors_as(lambda said: ConfigError(f"checkpoint.remote={url} cannot be written ({said}): {advice}")):
        retry(url, retry_s, call)


def remote_checkpoints(url: str, retry_s: float = RETRY_S) -> list[tuple[int, str]]:
    """(step, URL) of each checkpoint with a manifest under a run's URL, the newest first; none where there is no run.

    Raises StorageError where the storage cannot be reached, CheckpointError where it does not let us look.
    """
    root = url.rstrip("/")
    with _looking(url):
        files = retry(url, retry_s, partial(StorageFolder(root).files, CHECKPOINTS))
    whole = [name for name, names in group_by_checkpoint(files).items() if MANIFEST in names]
    found = [(step_of(Path(name)), f"{root}/{CHECKPOINTS}/{name}") for name in whole]
    return sorted(found, reverse=True)


def fetch(url: str, into: Path, retry_s: float = RETRY_S) -> Path:
    """A checkpoint at a URL becomes one in the folder `into`, which it enters when every hash has been compared.

    Raises CheckpointError where it is damaged or cannot be written here, StorageError in an outage.
    """
    name = url.rstrip("/").rpartition("/")[2]
    require(is_checkpoint(name), f"{url} is no checkpoint: its name must be step-… with the step")
    final, temporary = into / name, into / f"tmp.{name}.{os.getpid()}"
    if final.exists():
        raise CheckpointError(f"{final} is there already: move it away, or resume from it")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _download(url, temporary, retry_s)
        if fault := find_damage(temporary):
            raise _Damaged(f"checkpoint {url} is damaged: {fault}")
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        temporary.rename(final)
        sync(into)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {url} cannot be fetched to {into} ({error_text(error)}): free space, and check the permissions"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def fetch_newest(
    url: str, into: Path, report: Callable[[str], None], retry_s: float = RETRY_S, after: int = -1
) -> Path | None:
    """Fetches a run's newest checkpoint of a later step than `after` whose hashes hold; None where there is none.

    Each damaged one is reported and skipped. Raises CheckpointError where all are damaged and there is none `after`
    which to go on, StorageError where the storage cannot be reached: what it holds may be newer than anything here.
    """
    places = [place for step, place in remote_checkpoints(url, retry_s) if step > after]
    for place in places:
        try:
            return fetch(place, into, retry_s)
        except _Damaged as error:
            report(f"{error}: falling back to the one before")
    if places and after < 0:
        raise CheckpointError(f"all checkpoints at {url} are damaged: restore one, or start a new run")
    return None


def fetch_history(url: str, run_dir: Path, retry_s: float = RETRY_S) -> None:
    """Fetches configuration, metrics and events of a run where they are not here, before anything else is written.

    Else the next upload would put this machine's short ones in their place. Raises as `remote_checkpoints`.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    for name in HISTORY_FILES:
        path = run_dir / name
        if not path.exists():
            with suppress(FileNotFoundError), _looking(url):
                content = read_file(f"{url.rstrip('/')}/{name}", retry_s)
                part = path.with_name(f".{name}.part")
                part.write_bytes(content)
                part.replace(path)


class _Damaged(CheckpointError):
    """A checkpoint that another one may stand in for."""


def _download(url: str, folder: Path, retry_s: float) -> None:
    """All files of a checkpoint, not yet compared."""
    try:
        with _looking(url):
            manifest = read_file(f"{url}/{MANIFEST}", retry_s)
        names = list(dict(json.loads(manifest)))
    except FileNotFoundError:
        raise _Damaged(f"checkpoint {url} is damaged: {MANIFEST} is missing") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise _Damaged(f"checkpoint {url} is damaged: {MANIFEST} cannot be read: {error}") from None
    with _looking(url):
        sizes = retry(url, retry_s, StorageFolder(url).files)
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*", name):  # a path could lead out of the folder
            raise _Damaged(f"checkpoint {url} is damaged: {MANIFEST} names {name!r}, which is no file of it")
        if name not in sizes:
            raise _Damaged(f"checkpoint {url} is damaged: {name} is missing")
    for name in names:
        download(f"{url}/{name}", folder / name, sizes[name], retry_s)
    (folder / MANIFEST).write_bytes(manifest)


def _looking(url: str) -> AbstractContextManager[None]:
    """What the storage does not allow becomes a CheckpointError; what is not there stays a FileNotFoundError."""
    advice = "check checkpoint.remote and the credentials"
    return errors_as(lambda said: CheckpointError(f"{url} cannot be read ({said}): {advice}"), FileNotFoundError)


def group_by_checkpoint(files: Iterable[str]) -> dict[str, list[str]]:
    """The files of each checkpoint, from names such as checkpoints/step-00000010/state.json."""
    found: dict[str, list[str]] = {}
    for name in files:
        parts = name.split("/")
        if len(parts) == 3 and is_checkpoint(parts[1]):
            found.setdefault(parts[1], []).append(parts[2])
    return found
