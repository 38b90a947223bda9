"""Tables of the offset and size of each sample's members in a shard, and the names by which they are cached."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.errors import DataError
from clipx.storage.files import errors_as, file_info

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Table = NDArray[np.int64]
    """[samples, 4 members, (offset, size)]; size -1 if the member is missing."""

IMAGE, TXT, JSON, CLS = range(4)  # the members of a sample, in the order of the columns of a table

Span = tuple[int, int]  # (first byte, number of bytes)

MISSING: Span = (0, -1)

RowSpans = Sequence[Span]  # row of a table: the span of each member

RETRY_S = 120.0  # default time in seconds for the retries of a remote read

_VERSION = 7  # of the choice of members, too: a cached index holds it
# Keys of fsspec's file systems for the modification time or checksum of a file; those of local files first.
_VERSIONS = (
    "mtime",
    "ETag",
    "etag",
    "md5Hash",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "updated",
    "created",
    "blob_id",  # of the Hugging Face hub
)
_FIX = "check the URL and the permission to read it"


class UnreadableShard(DataError):
    """No sample of a shard can be read."""


class MissingShard(UnreadableShard):
    """A shard does not exist."""


def fingerprint(caption_keys: Iterable[str], label_key: str | None, digests: Iterable[str]) -> str:
    """Returns the fingerprint of a data set from the digests of its shards."""
    facts = [" + ".join(caption_keys), str(label_key), *digests]
    return hashlib.sha256("\n".join(facts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def key_digests(names: Iterable[str]) -> NDArray[np.void]:
    """Returns a digest of 128 bits of each sample's name, as (u8, u8). A leading ./ of a name is ignored."""
    import numpy as np

    encoded = (name.removeprefix("./").encode("utf-8", "replace") for name in names)
    digests = b"".join(hashlib.blake2b(name, digest_size=16).digest() for name in encoded)
    return np.frombuffer(digests, dtype="<u8,<u8")


def caption_columns(keys: Iterable[str]) -> list[int]:
    """Returns the columns of a table that hold the captions of these keys."""
    return sorted({TXT if key == "txt" else JSON for key in keys})


@lru_cache(maxsize=256)
def load_table(path: str) -> Table:
    """Maps a table into memory, which loader processes share."""
    import numpy as np

    table: Table = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    return table


def file_version(url: str, captions: Sequence[int], retry_s: float, patient: bool = False) -> tuple[str, int]:
    """Returns the name of a file's index, which changes with the file and the columns `captions`, and the file's size.
    Raises DataError, and MissingShard if the file does not exist."""
    info = shard_info(url, retry_s, patient)
    version = next((info[key] for key in _VERSIONS if info.get(key)), None)
    location = url if "://" in url else Path(url).resolve()
    identity = f"{_VERSION} {'+'.join(map(str, captions))} {location} {info['size']} {version}"
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32], int(info["size"])


def shard_info(url: str, retry_s: float, patient: bool = False) -> Mapping[str, Any]:
    """Returns what the storage knows of a shard, its size among it. Raises as `file_version`. Writes nothing."""
    try:
        with errors_as(DataError, f"shard {url} cannot be opened", _FIX, FileNotFoundError):
            info = file_info(url, retry_s, patient)
    except FileNotFoundError:
        raise MissingShard(f"shard {url} does not exist: check the path") from None
    if info["type"] == "directory":
        raise DataError(f"shard {url} is a folder: give its tar files, e.g. {url.rstrip('/')}/*.tar")
    if info["size"] is None:
        raise DataError(
            f"shard {url} has no known size, which random access needs: copy it to a storage that reports sizes"
        )
    return info
