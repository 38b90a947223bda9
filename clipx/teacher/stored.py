"""A teacher's embeddings, written once by `python -m clipx.embed` and found by a sample's number and its caption."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from clipx.data.source import BadSample, Sample, Source
from clipx.errors import ConfigError, DataError
from clipx.teacher.embedding_store import MANIFEST, PLAN, VERSION, caption_hash, npy_files

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAPPED = 64  # shards at a time and process; samples that are shuffled together come from few


@dataclass(frozen=True, slots=True)
class StoredEmbeddings:
    """Gives α·image_T and text_T of a sample, in float32 or as they are stored if that is wider.

    Pickled to loader processes, which map the files themselves.
    """

    folder: str
    samples_per_shard: int
    width: int
    scale: float  # α
    digest: str  # of the weights that they were made with
    description: str

    @classmethod
    def open(cls, folder: str, temperature: float | None, train: Source) -> StoredEmbeddings:
        """Raises DataError where they are not whole, or of other data; ConfigError where α is not known."""
        named = f"teacher.embeddings={folder}"
        place = Path(folder).expanduser()
        manifest = _manifest(place, named)
        if manifest["format"] != "npy":
            raise DataError(
                f"{named} is stored as {manifest['format']}, which cannot be read by row: write it with format=npy"
            )
        if (manifest["data"], manifest["samples"]) != (train.fingerprint, sum(train.sizes)):
            raise DataError(
                f"{named} is of other data (fingerprint {manifest['data']}, {manifest['samples']:,} samples) than this "
                f"run's training data ({train.fingerprint}, {sum(train.sizes):,}): write it with this run's data=…"
            )
        _check_files(place, manifest["shards"], named)
        scale = manifest["scale"] if temperature is None else 1 / temperature
        if scale is None:
            raise ConfigError(
                f"{named} is of a model that was not trained with one temperature: give teacher.temperature, e.g. 0.01"
            )
        description = f"{folder}, {manifest['samples']:,} samples, {manifest['dtype']}, width {manifest['width']}"
        stored = cls(
            str(place), manifest["samples_per_shard"], manifest["width"], scale, str(manifest["weights"]), description
        )
        _shard(stored.folder, 0, stored.width)
        return stored

    def rows(self, index: int, sample: Sample, caption: str) -> tuple[Tensor, ...]:
        """(α·image_T, text_T). Raises BadSample where either was not embedded."""
        number, row = divmod(index, self.samples_per_shard)
        shard = _shard(self.folder, number, self.width)
        start, stop = shard.offsets[row : row + 2]
        if start == stop:
            raise BadSample("teacher.embeddings has nothing of it, for it could not be read when they were written")
        (found,) = np.nonzero(shard.captions[start:stop] == caption_hash(caption))
        if not len(found):
            raise BadSample("teacher.embeddings has not its caption: write them with the captions that this run draws")
        image_T, text_T = (_tensor(x) for x in (shard.image[row], shard.text[start + found[0]]))
        return self.scale * image_T, text_T


@dataclass(frozen=True, slots=True)
class _Shard:
    """Mapped, so that processes share its memory."""

    image: NDArray[Any]
    text: NDArray[Any]
    captions: NDArray[np.uint64]
    offsets: NDArray[np.int64]


@lru_cache(maxsize=_MAPPED)
def _shard(folder: str, number: int, width: int) -> _Shard:
    """Raises DataError."""
    paths = [Path(folder, name) for name in npy_files(number)]
    try:
        mapped = [np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray) for path in paths]
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"embeddings of shard {number} in {folder} cannot be read ({error}): write them anew") from None
    for path, rows in zip(paths[:2], mapped[:2], strict=True):
        if rows.ndim != 2 or rows.shape[1] != width:
            raise DataError(f"{path} has shape {list(rows.shape)}, and the manifest says width {width}: write it anew")
    return _Shard(*mapped)


def _tensor(row_T: NDArray[Any]) -> Tensor:
    found = torch.from_numpy(np.array(row_T))
    return found.to(torch.promote_types(found.dtype, torch.float32))


def _manifest(place: Path, named: str) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (place / PLAN).is_file():
            raise DataError(f"{named} is not finished: give its python -m clipx.embed command again") from None
        raise DataError(f"{named} holds no embeddings of python -m clipx.embed: check the path") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{place / MANIFEST} cannot be read ({error}): write the embeddings anew") from None
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        raise DataError(f"{place / MANIFEST} is not of this version of clipx: write the embeddings anew")
    return manifest


def _check_files(place: Path, shards: list[dict[str, Any]], named: str) -> None:
    """By their sizes, which takes one look at the folder."""
    there = {entry.name: entry.stat().st_size for entry in os.scandir(place) if entry.is_file()}
    for number, shard in enumerate(shards):
        for name in npy_files(number):
            size, _ = shard["files"][name]
            if there.get(name) != size:
                found = "is gone" if name not in there else f"has {there[name]:,} bytes, not {size:,}"
                raise DataError(f"{named}: {name} {found}: give its python -m clipx.embed command again")
