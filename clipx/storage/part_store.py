"""A folder, local or at a URL, whose parts several processes write in any order, each with a record written last.

The record has the sizes and hashes of the part's files, so that a later command finds the complete and intact parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clipx.errors import ConfigError, DataError, require
from clipx.escape import json_text
from clipx.storage.files import errors_as, is_local, local_path
from clipx.storage.local import acquire_lock, ensure_folder, open_own, remove_partial, write_atomically, writing
from clipx.storage.remote import StorageFolder, retry
from clipx.storage.safe_json import parse_json, read_regular

_FIX = "make room, or give another folder with out=…"
_LARGEST = 1 << 36  # bytes of a part, which its writer held in memory
_ACCESS_FIX = "check the URL and the permissions to read and write it"

Record = dict[str, Any]
"""Record of a complete part: files {name: [bytes, SHA-256]}, and values of the command."""


def record_file(number: int) -> str:
    """Returns the name of the record of a part."""
    return f"{number:05d}.json"


class PartStore:
    """A folder of parts, local or at a URL. Methods raise DataError if it cannot be read or written."""

    def __init__(self, out: str, retry_s: float) -> None:
        self.out, self._retry_s = out.rstrip("/"), retry_s
        self.folder = Path(local_path(out)).expanduser() if is_local(out) else None
        if self.folder is not None:
            ensure_folder(self.folder, f"out={out}", "give")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks a local folder against other commands, and removes temporary files of a killed command."""
        if self.folder is None:
            yield
            return
        try:
            lock = open_own(self.folder / ".lock", "w")
        except OSError as error:
            fix = "give a writable folder, or remove its .lock"
            raise ConfigError(f"out={self.out} cannot be written ({error.strerror}): {fix}") from None
        with lock:
            acquire_lock(lock, f"out={self.out}")
            remove_partial(self.folder)
            yield

    def check_plan(self, name: str, plan: dict[str, Any], what: str) -> None:
        """Compares `plan`, on which all parts depend, with that of an earlier run in the file `name`, or writes it.

        Raises ConfigError if they differ. `what`: what the parts contain, for the message.
        """
        text = self.read_text(name)
        if text is None:
            self.put_json(name, plan)
            return
        fix = "give another folder, or delete this one"
        before = parse_json(text)
        changed = [key for key in {**before, **plan} if before.get(key) != plan.get(key)]
        differences = ", ".join(f"{key} was {before.get(key)}, is {plan.get(key)}" for key in changed)
        require(not changed, f"out={self.out} holds other {what} ({differences}): {fix}")

    def put(self, name: str, write: Callable[[str], object]) -> list[Any]:
        """Writes a file by `write(path)` to a temporary path, then renames or uploads it. Returns [bytes, SHA-256]."""
        if self.folder is not None:
            write_atomically(self.folder / name, write, _FIX)
            return _size_and_hash(self.folder / name)
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary, name)
            write(str(path))
            self._retry(lambda: StorageFolder(self.out).put(path, name))
            return _size_and_hash(path)

    def read_bytes(self, name: str) -> bytes:
        """Returns the content of a file. Raises FileNotFoundError."""
        if self.folder is not None:
            return read_regular(self.folder / name, _LARGEST)
        content: bytes = self._retry(lambda: StorageFolder(self.out).read(name))
        return content

    def read_text(self, name: str) -> str | None:
        """Returns the content of a file, or None if it does not exist."""
        try:
            return str(self.read_bytes(name), "utf-8")
        except FileNotFoundError:
            return None

    def sizes(self) -> dict[str, int]:
        """Returns {name: bytes} of all files in the folder."""
        if self.folder is not None:
            return {path.name: path.stat().st_size for path in self.folder.iterdir() if path.is_file()}
        found: dict[str, int] = self._retry(lambda: StorageFolder(self.out).files())
        return found

    def _is_intact(self, files: Mapping[str, list[Any]], sizes: Mapping[str, int]) -> bool:
        """Verifies files against their record: local files by size and SHA-256, files at a URL by size only."""
        if any(sizes.get(name) != size for name, (size, _) in files.items()):
            return False
        return self.folder is None or all(
            _size_and_hash(self.folder / name) == expected for name, expected in files.items()
        )

    def _retry(self, call: Callable[[], Any]) -> Any:
        with errors_as(DataError, f"out={self.out} cannot be used", _ACCESS_FIX, FileNotFoundError):
            return retry(self.out, self._retry_s, call)

    def put_json(self, name: str, value: Any) -> None:
        """Writes a value as a JSON file."""
        self.put_text(name, json_text(value, indent=1, sort_keys=True) + "\n")

    def put_text(self, name: str, text: str) -> None:
        """Writes a text file."""
        self.put(name, writing(text.encode()))

    def finished(self, numbers: Sequence[int]) -> dict[int, Record]:
        """Returns the records of those parts in `numbers` that are complete and intact."""
        sizes, records = self.sizes(), {}
        for number in numbers:
            if record_file(number) not in sizes:
                continue
            record = parse_json(self.read_bytes(record_file(number)))
            if self._is_intact(record["files"], sizes):
                records[number] = record
        return records


def _size_and_hash(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]
