"""Tables of the offset and size of each sample's members in a shard, and the names by which they are cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.errors import ConfigError, DataError, StorageRefused
from clipx.storage.files import errors_as, file_info, read_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Table = NDArray[np.int64]
    "[samples, 4 members, (offset, size)]; size -1 if the member is missing."


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


# ----------------------------------------------------------------------------------------------- listed numbers


_REQUESTS = 64  # concurrent reads of small files
_MOST = 1 << 31  # samples of a shard: a tar of as many empty members has 2 TiB


@dataclass(frozen=True, slots=True)
class Counts:
    """The listed number of samples of each shard."""

    samples: Sequence[int]

    by: str  # name of the file or option that lists them, for messages
    digests: Sequence[str] = ()  # digests of the shards, as in their indices. () if they are not listed

    def select(self, urls: Sequence[str], chosen: Sequence[bool]) -> tuple[list[str], Counts]:
        """Returns some of the shards and their counts."""
        digests = list(compress(self.digests, chosen))
        return list(compress(urls, chosen)), Counts(list(compress(self.samples, chosen)), self.by, digests)

    def fingerprint(self, urls: Sequence[str], caption_keys: Iterable[str], label_key: str | None) -> str:
        """Returns a fingerprint of what is listed: names and numbers of samples, not the content of the shards."""
        shards = [f"{_name(url)} {count}" for url, count in zip(urls, self.samples, strict=True)]
        facts = "\n".join([" + ".join(caption_keys), str(label_key), *shards])
        return f"listed-{hashlib.sha256(facts.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that `python -m clipx.index` wrote."""

    path: str
    caption_key: Any
    shards: dict[str, dict[str, Any]]  # {url: facts}, in the order of the file

    @classmethod
    def read(cls, path: str, retry_s: float) -> Manifest:
        """Reads a manifest. Raises ConfigError if it is none."""
        named, fix = f"data.manifest={path} cannot be read", "give the file of python -m clipx.index manifest=…"
        with errors_as(ConfigError, named, fix):
            text = read_file(path, retry_s)
        try:
            content = json.loads(text)
            shards = {str(shard["url"]): dict(shard) for shard in content["shards"]}
            if not all(_is_count(shard["samples"]) for shard in shards.values()):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ConfigError(f"{named} (it is no manifest): {fix}") from None
        return cls(path, content.get("caption_key"), shards)

    def counts(self, urls: Sequence[str]) -> Counts:
        """Returns the numbers of samples of the shards, found by URL or else by name: they may have been moved. Raises
        ConfigError for a shard that is not in the manifest."""
        by_name: dict[str, list[dict[str, Any]]] = {}
        for url, facts in self.shards.items():
            by_name.setdefault(_name(url), []).append(facts)
        found = []
        for url in urls:
            same = [self.shards[url]] if url in self.shards else by_name.get(_name(url), [])
            if len(same) != 1:
                raise ConfigError(
                    f"data.manifest={self.path} does not list {url}: write it again for these shards, or remove it"
                )
            found.append(same[0])
        digests = [str(facts["digest"]) for facts in found if facts.get("digest")]
        samples = [int(facts["samples"]) for facts in found]
        return Counts(samples, f"data.manifest={self.path}", digests if len(digests) == len(found) else ())


def listed_counts(
    urls: Sequence[str], retry_s: float, count_others: Callable[[Sequence[str]], Sequence[int]] | None = None
) -> Counts | None:
    """Returns the numbers of samples listed next to the shards, or None if that of the first shard is not listed.
    `count_others` counts the samples of shards that are not listed; None: all must be. Raises DataError if the storage
    fails."""
    first, file = listed_in_files(urls[0], retry_s)
    if first is None:
        return None
    with ThreadPoolExecutor(_REQUESTS) as pool:
        listed = [count for count, _ in pool.map(partial(listed_in_files, retry_s=retry_s), urls)]
    others = [url for url, count in zip(urls, listed, strict=True) if count is None]
    if others and count_others is None:
        return None
    counted = dict(zip(others, count_others(others), strict=True)) if count_others and others else {}
    return Counts([counted.get(url, 0) if n is None else n for url, n in zip(urls, listed, strict=True)], file)


def listed_in_files(url: str, retry_s: float) -> tuple[int | None, str]:
    """Returns the number of samples listed next to a shard, None if it is unknown, and the name of the file."""
    folder, slash, name = url.rpartition("/")
    # sizes.json first: one request for all shards of a folder.
    for file, key in ((f"{folder}{slash}sizes.json", name), (f"{url.removesuffix('.tar')}_stats.json", "successes")):
        listed = (_folder_sizes if key == name else _json_object)(file, retry_s).get(key)
        if _is_count(listed):
            return listed, _name(file)
    return None, ""


def _is_count(value: Any) -> bool:
    """Returns whether a value can be the number of samples of a shard, for each of which memory is allocated."""
    return isinstance(value, int) and 0 <= value < _MOST


def _name(url: str) -> str:
    return url.rpartition("/")[2]


def _json_object(url: str, retry_s: float) -> dict[str, Any]:
    """Reads a JSON object. Returns {} if it is missing or unreadable. Raises DataError if the storage fails."""
    try:
        found = json.loads(read_file(url, retry_s))
    except StorageRefused:  # S3 answers so if the file is missing and the credentials may not list the bucket
        return {}
    except DataError:
        raise
    except Exception:  # missing or not JSON: a remote file system raises the exceptions of its library
        return {}
    return found if isinstance(found, dict) else {}


_folder_sizes = lru_cache(maxsize=64)(_json_object)
