"""Attack payloads: objects that run code when unpickled, and strings that do when given to a shell.

Each would create a flag file.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image


class Flag:
    """A file that only a successful attack creates. `check` first proves that the payload works."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (os.system, (f"touch {self.path}",))

    def pickled(self) -> bytes:
        return pickle.dumps(self)

    def saved(self) -> bytes:
        """Returns the payload as torch.save writes it, in a zip."""
        file = io.BytesIO()
        torch.save({"weight": self}, file)
        return file.getvalue()

    def saved_of_old(self) -> bytes:
        file = io.BytesIO()
        torch.save({"weight": self}, file, _use_new_zipfile_serialization=False)
        return file.getvalue()

    def array(self) -> bytes:
        file = io.BytesIO()
        np.save(file, np.array([self], dtype=object), allow_pickle=True)
        return file.getvalue()

    def is_made_by(self, unsafe: Callable[[], object]) -> bool:
        """Returns True if a call creates the flag, which is then removed."""
        with contextlib.suppress(Exception):
            unsafe()
        made = self.path.exists()
        self.path.unlink(missing_ok=True)
        return made

    @property
    def absent(self) -> bool:
        return not self.path.exists()


def jpeg(seed: int = 0, side: int = 24) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def member(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, link
    return info, content


def write_tar(path: Path, members: Iterable[tuple[tarfile.TarInfo, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


def sample(name: str, seed: int = 0) -> list[tuple[tarfile.TarInfo, bytes]]:
    return [member(f"{name}.jpg", jpeg(seed)), member(f"{name}.txt", b"a caption")]
