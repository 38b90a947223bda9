"""Stored embeddings of a teacher, written by `python -m clipx.embed` and looked up by sample index and caption."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from clipx.data.source import BadSample, Sample, Source
from clipx.errors import ConfigError, DataError
from clipx.storage.safe_json import read_as, read_regular
from clipx.teacher.embedding_store import MANIFEST, PLAN, VERSION, caption_hash, npy_files

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Count = Annotated[int, Field(ge=0)]
_MAPPED = 64  # mapped shards per process; samples that are shuffled together come from few shards


@dataclass(frozen=True, slots=True)
class _Version:
    version: int


@dataclass(frozen=True, slots=True)
class _Record:
    """Record of a shard in the manifest."""

    files: dict[str, tuple[_Count, str]]  # bytes and SHA-256 by name


@dataclass(frozen=True, slots=True)
class _Manifest:
    """Values of manifest.json that training reads."""

    format: str
    data: str  # fingerprint
    weights: str  # digest
    dtype: str
    samples: _Count
    samples_per_shard: Annotated[int, Field(gt=0)]
    width: Annotated[int, Field(gt=0)]
    scale: FiniteFloat | None
    shards: list[_Record]


@dataclass(frozen=True, slots=True)
class StoredEmbeddings:
    """Returns α·image_T and text_T of a sample, in float32, or in the stored format if that is wider.

    Pickled to loader processes, each of which maps the files into memory.
    """

    folder: str
    samples_per_shard: int
    width: int
    scale: float
    """α, the inverse of the teacher's temperature, or 1 if its similarities are used without it."""

    digest: str
    """Digest of the teacher's weights."""

    description: str

    @classmethod
    def open(cls, folder: str, temperature: float | None, train: Source, logits: bool = True) -> StoredEmbeddings:
        """Opens the embeddings of the training source `train`.

        Args:
            temperature: temperature of the teacher; None: the stored one.
            logits: whether the products of the embeddings are logits. False: similarities, without a temperature.

        Raises DataError if they are incomplete or of other data, and ConfigError if the temperature is unknown.
        """
        named = f"teacher.embeddings={folder}"
        place = Path(folder).expanduser()
        manifest = _manifest(place, named)
        if manifest.format != "npy":
            raise DataError(
                f"{named} is stored as {manifest.format}, which has no random access: write it with format=npy"
            )
        if (manifest.data, manifest.samples) != (train.fingerprint, sum(train.sizes)):
            raise DataError(
                f"{named} is of other data (fingerprint {manifest.data}, {manifest.samples:,} samples) than this "
                f"run's training data ({train.fingerprint}, {sum(train.sizes):,}): write it with this run's data=…"
            )
        _check_files(place, manifest.shards, named)
        scale = (manifest.scale if temperature is None else 1 / temperature) if logits else 1.0
        if scale is None:
            raise ConfigError(
                f"{named} has no temperature (the model was trained without a single one, or saved without it): give "
                "teacher.temperature, e.g. 0.01"
            )
        description = f"{folder}, {manifest.samples:,} samples, {manifest.dtype}, width {manifest.width}"
        stored = cls(str(place), manifest.samples_per_shard, manifest.width, scale, manifest.weights, description)
        _shard(stored.folder, 0, stored.width)
        return stored

    def rows(self, index: int, sample: Sample, caption: str) -> tuple[Tensor, ...]:
        """Returns (α·image_T, text_T). Raises BadSample if the sample or the caption was not embedded."""
        number, row = divmod(index, self.samples_per_shard)
        shard = _shard(self.folder, number, self.width)
        start, stop = shard.offsets[row : row + 2]
        if start == stop:
            raise BadSample("teacher.embeddings lacks the sample: it could not be read when they were written")
        (found,) = np.nonzero(shard.captions[start:stop] == caption_hash(caption))
        if not len(found):
            raise BadSample("teacher.embeddings lacks the caption: write them with the captions that this run draws")
        image_T, text_T = (_tensor(x) for x in (shard.image[row], shard.text[start + found[0]]))
        return self.scale * image_T, text_T


@dataclass(frozen=True, slots=True)
class _Shard:
    """Arrays of a shard, mapped into memory that processes share. See embedding_store for the shapes."""

    image: NDArray[Any]
    text: NDArray[Any]
    captions: NDArray[np.uint64]
    offsets: NDArray[np.int64]


@lru_cache(maxsize=_MAPPED)
def _shard(folder: str, number: int, width: int) -> _Shard:
    """Maps the files of a shard. Raises DataError if they cannot be read or do not have the width of the manifest."""
    paths = [Path(folder, name) for name in npy_files(number)]
    try:
        mapped = [np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray) for path in paths]
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"embeddings of shard {number} in {folder} cannot be read ({error}): rewrite them") from None
    for path, rows in zip(paths[:2], mapped[:2], strict=True):
        if rows.ndim != 2 or rows.shape[1] != width:
            raise DataError(f"{path} has shape {list(rows.shape)}, but the manifest has width {width}: rewrite it")
    return _Shard(*mapped)


def _tensor(row_T: NDArray[Any]) -> Tensor:
    found = torch.from_numpy(np.array(row_T))
    return found.to(torch.promote_types(found.dtype, torch.float32))


def _manifest(place: Path, named: str) -> _Manifest:
    try:
        content = read_regular(place / MANIFEST)
        version = read_as(_Version, content).version
        if version != VERSION:
            raise DataError(f"{place / MANIFEST} has another format version than {VERSION}: rewrite the embeddings")
        return read_as(_Manifest, content)
    except FileNotFoundError:
        if (place / PLAN).is_file():
            raise DataError(f"{named} is incomplete: run its python -m clipx.embed command again") from None
        raise DataError(f"{named} holds no embeddings of python -m clipx.embed: check the path") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{place / MANIFEST} cannot be read ({error}): rewrite the embeddings") from None


def _check_files(place: Path, shards: list[_Record], named: str) -> None:
    """Verifies the sizes of all files, which takes a single scan of the folder. Raises DataError."""
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(place) if entry.is_file()}
    for number, shard in enumerate(shards):
        for name in npy_files(number):
            size, _ = shard.files.get(name, (-1, ""))
            if sizes.get(name) != size:
                found = "is missing" if name not in sizes else f"has {sizes[name]:,} bytes, not {size:,}"
                raise DataError(f"{named}: {name} {found}: run its python -m clipx.embed command again")
