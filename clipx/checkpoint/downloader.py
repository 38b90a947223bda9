"""Downloads from the copy of a run directory at a URL, which uploader.py writes.

    <url>/config.yaml metrics.jsonl events.jsonl …      small files, uploaded with each checkpoint and at the end
    <url>/checkpoints/step-00000010/…, MANIFEST.json    checkpoint, as on disk

A checkpoint is complete when its manifest exists, which is written after its files have been listed with the right
sizes. It is used only after the SHA-256 of every file has been verified.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from clipx.checkpoint.format import find_damage, write_file
from clipx.checkpoint.records import MANIFEST, DamagedCheckpoint, read_manifest
from clipx.checkpoint.resume import CHECKPOINTS, is_checkpoint, step_of
from clipx.errors import CheckpointError, ConfigError, require
from clipx.logger.spec import id_files
from clipx.storage.failure import error_text
from clipx.storage.files import errors_as, read_file
from clipx.storage.local import sync, write_bytes
from clipx.storage.remote import StorageFolder, download, retry

_HISTORY = ("config.yaml", "metrics.jsonl", "events.jsonl", "quarantine.jsonl")
RETRY_S = 120.0  # time during which an unreachable storage is retried


def history_files() -> list[str]:
    """Returns the names of the files that a run needs to resume elsewhere, in the same runs of its loggers."""
    return [*_HISTORY, *id_files()]


def check_writable(url: str, retry_s: float = RETRY_S) -> None:
    """Verifies write access by writing and removing a small file. Raises ConfigError, or StorageError in an outage."""
    folder, name = StorageFolder(url), f".writable.{os.getpid()}"

    def call() -> None:
        folder.write(name, b"clipx")
        folder.remove(name)

    advice = "check the URL, that it exists, and that the credentials allow writing and deleting"
    with errors_as(ConfigError, f"checkpoint.remote={url} cannot be written", advice):
        retry(url, retry_s, call)


def remote_checkpoints(url: str, retry_s: float = RETRY_S) -> list[tuple[int, str]]:
    """Lists (step, URL) of each checkpoint with a manifest under a run's URL, newest first.

    Raises StorageError if the storage cannot be reached, CheckpointError if it refuses to list.
    """
    root = url.rstrip("/")
    with _refusals(url):
        files = retry(url, retry_s, partial(StorageFolder(root).files, CHECKPOINTS))
    complete = [name for name, names in group_by_checkpoint(files).items() if MANIFEST in names]
    return sorted([(step_of(Path(name)), f"{root}/{CHECKPOINTS}/{name}") for name in complete], reverse=True)


def check_new(url: str, retry_s: float = RETRY_S) -> None:
    """Raises CheckpointError if a new run would overwrite a run at its URL; StorageError as `remote_checkpoints`."""
    if remote_checkpoints(url, retry_s):
        raise CheckpointError(
            f"{url} already holds a run: continue it with resume=auto, or give this run another name="
        )


def fetch(url: str, into: Path, retry_s: float = RETRY_S) -> Path:
    """Downloads a checkpoint into the folder `into`, where it appears after every hash has been verified.

    Returns its path. Raises CheckpointError if it is damaged or cannot be written locally, StorageError in an outage.
    """
    name = url.rstrip("/").rpartition("/")[2]
    require(is_checkpoint(name), f"{url} is not a checkpoint: its name must be step- and the step, e.g. step-00000010")
    final, temporary = into / name, into / f"tmp.{name}.{os.getpid()}"
    if final.exists():
        raise CheckpointError(f"{final} already exists: move it, or resume from it")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _download(url, temporary, retry_s)
        if damage := find_damage(temporary, step_of(final)):
            raise DamagedCheckpoint(damage)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        temporary.rename(final)
        sync(into)
    except DamagedCheckpoint as damage:
        raise DamagedCheckpoint(f"checkpoint {url} is damaged: {damage}") from None
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
    """Downloads a run's newest checkpoint whose step is after `after` and whose hashes match. Returns None without one.

    Each damaged one is reported and skipped. Raises CheckpointError if all are damaged and `after` is negative (there
    is no local one), StorageError if the storage cannot be reached.
    """
    urls = [checkpoint for step, checkpoint in remote_checkpoints(url, retry_s) if step > after]
    damages = []
    for checkpoint in urls:
        try:
            return fetch(checkpoint, into, retry_s)
        except DamagedCheckpoint as error:
            report(f"{error}: falling back to the previous checkpoint")
            damages.append(str(error))
    if damages and after < 0:
        raise CheckpointError(f"all checkpoints at {url} are damaged ({damages[0]}): restore one, or start a new run")
    return None


def fetch_history(url: str, run_dir: Path, retry_s: float = RETRY_S) -> None:
    """Downloads the history files of a run that are missing locally, before these are written and replace those there.

    Raises as `remote_checkpoints`.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    fetch_files(url, run_dir, [name for name in history_files() if not (run_dir / name).exists()], retry_s)


def fetch_files(url: str, folder: Path, names: Iterable[str], retry_s: float = RETRY_S) -> None:
    """Downloads small files of a run, in place of earlier copies. Raises as `remote_checkpoints`, and DiskError."""
    for name in names:
        path = folder / name
        try:
            with _refusals(url):
                content = read_file(f"{url.rstrip('/')}/{name}", retry_s)
        except FileNotFoundError:
            path.unlink(missing_ok=True)
        else:
            write_bytes(path, content, "make room, or choose another folder")


def _download(url: str, folder: Path, retry_s: float) -> None:
    """Downloads all files of a checkpoint without verifying hashes. Raises DamagedCheckpoint if a file is missing."""
    with _refusals(url):
        sizes = retry(url, retry_s, StorageFolder(url).files)
        content = read_file(f"{url}/{MANIFEST}", retry_s) if MANIFEST in sizes else None
    if content is None:
        raise DamagedCheckpoint(f"{MANIFEST} is missing")
    manifest = read_manifest(content)
    if missing := [name for name in manifest if name not in sizes]:
        raise DamagedCheckpoint(f"{missing[0]} is missing")
    for name in manifest:
        download(f"{url}/{name}", folder / name, sizes[name], retry_s)
    write_file(folder / MANIFEST, [content])


def _refusals(url: str) -> AbstractContextManager[None]:
    """Converts errors of the storage to CheckpointError, except FileNotFoundError."""
    advice = "check the URL and the credentials"
    return errors_as(CheckpointError, f"{url} cannot be read", advice, FileNotFoundError)


def group_by_checkpoint(files: Iterable[str]) -> dict[str, list[str]]:
    """Groups names such as checkpoints/step-00000010/state.json by checkpoint. Returns its file names."""
    found: dict[str, list[str]] = {}
    for name in files:
        parts = name.split("/")
        if len(parts) == 3 and is_checkpoint(parts[1]):
            found.setdefault(parts[1], []).append(parts[2])
    return found
