"""Stored embeddings of teachers, written by `python -m clipx.embed`, looked up by sample index, view and caption.

They are in shards, which several processes can write in any order.

    out/embed.json          plan: what all shards depend on (model, weights, data, number formats); written first
        00000.image.npy     [n, D], one row per sample; NaN if the sample could not be read. [n, V, D] with V views
        00000.boxes.npy     [n, V, 4] int32, with views: left, top, right, bottom of each crop in pixels of the image
        00000.text.npy      [m, D], one row per caption: the captions of all samples, concatenated
        00000.captions.npy  [m] uint64, a hash of each caption
        00000.offsets.npy   [n + 1] int64: the captions of sample i are the rows from offsets[i] to offsets[i + 1]
        00000.json          record: size and SHA-256 of these files, and the bad samples; written last
        manifest.json       the plan and all records; written when all shards are complete

Row i of shard k is sample k * samples_per_shard + i of the source. In Parquet format, a shard is one file with one row
per sample and the columns index, key, image, captions and text. In WebDataset format, it is a tar (clipx.extra.embed).
The record of a shard is that of clipx/storage/part_store.py, with samples, captions and bad [[key, reason], …].
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from clipx.data.images import Draw, crop_seed
from clipx.data.npy import map_array
from clipx.data.source import BadSample, Sample, Source
from clipx.data.transform import Box
from clipx.errors import ConfigError, DataError, require, require_effect
from clipx.storage.safe_json import read_as, read_regular

if TYPE_CHECKING:
    from numpy.typing import NDArray

PLAN, MANIFEST, VERSION = "embed.json", "manifest.json", 1

_Count = Annotated[int, Field(ge=0)]
_MAPPED = 64  # mapped shards per process; samples that are shuffled together come from few shards


@dataclass(frozen=True, slots=True)
class _Version:
    version: int


@dataclass(frozen=True, slots=True)
class _StoredFile:
    """Record of a shard in the manifest."""

    files: dict[str, tuple[_Count, str]]  # bytes and SHA-256 by name


@dataclass(frozen=True, slots=True)
class _StoredManifest:
    """Values of manifest.json that training reads."""

    format: str
    data: str  # fingerprint
    weights: str  # digest
    dtype: str
    samples: _Count
    samples_per_shard: Annotated[int, Field(gt=0)]
    width: Annotated[int, Field(gt=0)]
    scale: FiniteFloat | None
    shards: list[_StoredFile]
    views: _Count = 0
    views_seed: int = 0
    crop_scale: list[FiniteFloat] = field(default_factory=list)
    view_options: dict[str, int | FiniteFloat | list[FiniteFloat]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredTeachers:
    """`TargetSource` of one or several teachers: (α·image_T, text_T) of each, for the same sample, crop and caption.
    Pickled to loader processes, each of which maps the files into memory."""

    teachers: Sequence[StoredEmbeddings]

    @classmethod
    def open(
        cls,
        folders: Sequence[str],
        temperatures: Sequence[float | None],
        train: Source,
        options: Mapping[str, Any],
        logits: bool = True,
    ) -> StoredTeachers:
        """Opens the embeddings of the training source `train`.

        Args:
            temperatures: temperature of each teacher; None: the stored one.
            options: options of crops and augmentation of the run, see DataSpec.view_options.
            logits: whether the products of the embeddings are logits. False: similarities, without a temperature.

        Raises DataError if they are incomplete or of other data, and ConfigError if a temperature is unknown or if
        their views differ from each other or from those of the run.
        """
        teachers = [
            StoredEmbeddings.open(folder, temperature, train, logits)
            for folder, temperature in zip(folders, temperatures, strict=True)
        ]
        first = teachers[0].views
        for folder, teacher in zip(folders, teachers, strict=True):
            require(
                teacher.views == first,
                f"teacher.embeddings={folder} has {teacher.views}, but {folders[0]} has {first}: the teachers of an "
                "ensemble need the same crops; write one of them again",
            )
        first.check_options(f"teacher.embeddings={folders[0]}", options)
        return cls(teachers)

    @property
    def digest(self) -> str:
        """Digest of the weights of all teachers and of the views."""
        views = self.teachers[0].views
        suffix = f"-{views.count}-views-of-seed-{views.seed}" if views.count else ""
        suffix += "".join(f"-{key}={value}" for key, value in views.changes())
        return "+".join(teacher.digest for teacher in self.teachers) + suffix

    @property
    def widths(self) -> list[int]:
        """Width of the embeddings of each teacher."""
        return [teacher.width for teacher in self.teachers]

    @property
    def description(self) -> str:
        return "; ".join(teacher.description for teacher in self.teachers)

    def draw(self, index: int, draw: Draw) -> Draw:
        """Draws one of the stored views. Raises BadSample if a teacher lacks the sample."""
        views = self.teachers[0].views
        if not views.count:
            return draw
        assert isinstance(draw.crop, random.Random)
        view = draw.crop.randrange(views.count)
        boxes = [teacher.box(index, view) for teacher in self.teachers]
        if boxes.count(boxes[0]) < len(boxes):
            raise BadSample("teacher.embeddings of the ensemble have different crops: write one of them again")
        return Draw(boxes[0], crop_seed(views.seed, index, view), view)

    def rows(self, index: int, sample: Sample, caption: str, crop: int = 0) -> tuple[Tensor, ...]:
        """Returns (α·image_T, text_T) of each teacher. Raises BadSample if it lacks the sample or the caption."""
        return tuple(row for teacher in self.teachers for row in teacher.rows(index, caption, crop))


@dataclass(frozen=True, slots=True)
class Views:
    """Stored crops of each sample. `count` 0: the embedding of the image as in evaluation."""

    count: int
    seed: int
    options: Mapping[str, Any]  # options with which they were drawn, see DataSpec.view_options

    def changes(self) -> list[tuple[str, Any]]:
        """Returns (key, value) of the options that are set, without crop_scale."""
        return sorted((key, value) for key, value in self.options.items() if key != "crop_scale")

    def check_options(self, named: str, options: Mapping[str, Any]) -> None:
        """Raises ConfigError if the options of a run are not those of the views. `named`: the key of the embeddings."""
        for key in sorted({*self.options, *options} if self.count else options):
            value, stored = options.get(key), self.options.get(key)
            if not self.count:
                require(
                    not key.startswith("augment."),
                    f"data.{key}={value} changes images, and those of {named} are unchanged: remove it, or write views "
                    "with it",
                )
            elif key not in options:
                raise ConfigError(f"{named} has views with data.{key}={stored}: give it")
            else:
                fix = f"give data.{key}={stored}" if key in self.options else "remove it"
                reason = f"on {named}, whose crops are stored"
                require_effect(value == stored, f"data.{key}={value}", reason, f"{fix}, as they were drawn")

    def __str__(self) -> str:
        if not self.count:
            return "no views"
        options = "".join(f", {key}={value}" for key, value in self.changes())
        return f"{self.count} views of seed {self.seed} and crop_scale={list(self.options['crop_scale'])}{options}"


@dataclass(frozen=True, slots=True)
class StoredEmbeddings:
    """α·image_T and text_T of each sample of one teacher, in float32, or in the stored format if that is wider."""

    folder: str
    samples_per_shard: int
    width: int
    views: Views
    scale: float  # α, the inverse of the teacher's temperature, or 1 if its similarities are used without it
    digest: str  # digest of the teacher's weights
    description: str

    @classmethod
    def open(cls, folder: str, temperature: float | None, train: Source, logits: bool) -> StoredEmbeddings:
        """Opens the embeddings of one teacher: see StoredTeachers."""
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
        _check_files(place, manifest, named)
        scale = (manifest.scale if temperature is None else 1 / temperature) if logits else 1.0
        if scale is None:
            raise ConfigError(
                f"{named} has no temperature (the model was trained without a single one, or saved without it): give "
                "teacher.temperature, e.g. 0.01"
            )
        options = {"crop_scale": manifest.crop_scale, **manifest.view_options} if manifest.views else {}
        views = Views(manifest.views, manifest.views_seed, options)
        description = f"{folder}, {manifest.samples:,} samples, {manifest.dtype}, width {manifest.width}"
        description += f", {views}" if views.count else ""
        stored = cls(
            str(place), manifest.samples_per_shard, manifest.width, views, scale, manifest.weights, description
        )
        stored._shard(0)
        return stored

    def box(self, index: int, view: int) -> Box:
        """Returns the box of a view. Raises BadSample if the sample was not embedded."""
        shard, row, _ = self._locate(index)
        assert shard.boxes is not None
        left, top, right, bottom = shard.boxes[row, view].tolist()
        return left, top, right, bottom

    def rows(self, index: int, caption: str, view: int) -> tuple[Tensor, Tensor]:
        """Returns (α·image_T, text_T). Raises BadSample if the sample or the caption was not embedded."""
        shard, row, (start, stop) = self._locate(index)
        (found,) = np.nonzero(shard.captions[start:stop] == caption_hash(caption))
        if not len(found):
            raise BadSample("teacher.embeddings lacks the caption: write them with the captions that this run draws")
        image = shard.image[row, view] if self.views.count else shard.image[row]
        image_T, text_T = (_tensor(x) for x in (image, shard.text[start + found[0]]))
        return self.scale * image_T, text_T

    def _locate(self, index: int) -> tuple[_StoredShard, int, tuple[int, int]]:
        """Returns (shard, row of a sample in it, range of its captions). Raises BadSample."""
        number, row = divmod(index, self.samples_per_shard)
        shard = self._shard(number)
        if row >= len(shard.image):
            raise DataError(
                f"embeddings of shard {number} in {self.folder} have {len(shard.image):,} samples, fewer than the "
                "manifest says: rewrite them"
            )
        start, stop = shard.offsets[row : row + 2].tolist()
        if start == stop:
            raise BadSample("teacher.embeddings lacks the sample: it could not be read when they were written")
        return shard, row, (start, stop)

    def _shard(self, number: int) -> _StoredShard:
        return _shard(self.folder, number, self.width, self.views.count)


@dataclass(frozen=True, slots=True)
class _StoredShard:
    """Arrays of a shard, mapped into memory that processes share. The module's docstring has the shapes."""

    image: NDArray[Any]
    text: NDArray[Any]
    captions: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    boxes: NDArray[np.int32] | None = None


@lru_cache(maxsize=_MAPPED)
def _shard(folder: str, number: int, width: int, views: int) -> _StoredShard:
    """Maps the files of a shard. Raises DataError if they cannot be read or do not have the shape of the manifest."""
    paths = [Path(folder, name) for name in _files(number, views)]
    mapped = [map_array(path, f"{path}, of embeddings,", "rewrite them") for path in paths]
    n, m = (array.shape[0] if array.ndim else 0 for array in (mapped[0], mapped[2]))
    crops = (views,) if views else ()
    expected = [("f", (n, *crops, width)), ("f", (m, width)), ("u", (m,)), ("i", (n + 1,)), ("i", (n, views, 4))]
    for path, array, (kind, shape) in zip(paths, mapped, expected, strict=False):
        if array.shape != shape or array.dtype.kind != kind or not array.dtype.isnative:
            raise DataError(
                f"{path} has {array.dtype} of shape {list(array.shape)}, must have {list(shape)} by the manifest and "
                "the other files: rewrite it"
            )
    offsets = mapped[3]
    if offsets[0] != 0 or offsets[-1] != m or bool((np.diff(offsets) < 0).any()):
        raise DataError(f"{paths[3]} does not place the {m:,} captions of its shard: rewrite it")
    return _StoredShard(*mapped)


def _files(number: int, views: int) -> tuple[str, ...]:
    return (*npy_files(number), *([boxes_file(number)] if views else []))


def _tensor(row_T: NDArray[Any]) -> Tensor:
    found = torch.from_numpy(np.array(row_T))
    return found.to(torch.promote_types(found.dtype, torch.float32))


def _manifest(place: Path, named: str) -> _StoredManifest:
    try:
        content = read_regular(place / MANIFEST)
        version = read_as(_Version, content).version
        if version != VERSION:
            raise DataError(f"{place / MANIFEST} has another format version than {VERSION}: rewrite the embeddings")
        return read_as(_StoredManifest, content)
    except FileNotFoundError:
        if (place / PLAN).is_file():
            raise DataError(f"{named} is incomplete: run its python -m clipx.embed command again") from None
        raise DataError(f"{named} holds no embeddings of python -m clipx.embed: check the path") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{place / MANIFEST} cannot be read ({error}): rewrite the embeddings") from None


def _check_files(place: Path, manifest: _StoredManifest, named: str) -> None:
    """Verifies the sizes of all files, which takes a single scan of the folder. Raises DataError."""
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(place) if entry.is_file()}
    for number, shard in enumerate(manifest.shards):
        for name in _files(number, manifest.views):
            size, _ = shard.files.get(name, (-1, ""))
            if sizes.get(name) != size:
                found = "is missing" if name not in sizes else f"has {sizes[name]:,} bytes, not {size:,}"
                raise DataError(f"{named}: {name} {found}: run its python -m clipx.embed command again")


def npy_files(number: int) -> tuple[str, str, str, str]:
    """Returns the names of the files (image, text, captions, offsets) of a shard."""
    image, text, captions, offsets = (f"{number:05d}.{part}.npy" for part in ("image", "text", "captions", "offsets"))
    return image, text, captions, offsets


def boxes_file(number: int) -> str:
    """Returns the name of the file with the boxes of the views of a shard."""
    return f"{number:05d}.boxes.npy"


def caption_hash(caption: str) -> int:
    """Returns a 64-bit hash that identifies a caption among those of its sample."""
    return int.from_bytes(hashlib.blake2b(caption.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
