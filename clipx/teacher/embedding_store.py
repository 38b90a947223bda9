"""Embeddings of a data source on disk, in shards of a number of samples that anybody can write in any order.

    out/embed.json          what all shards depend on: model, weights, data, number formats; written first
        00000.image.npy     [n, D], a row a sample; NaN where it could not be read
        00000.text.npy      [m, D], a row a caption, all captions of all samples one after the other
        00000.captions.npy  [m] uint64, a hash of each caption
        00000.offsets.npy   [n + 1] int64: captions of sample i are the rows from offsets[i] to offsets[i + 1]
        00000.json          size and SHA-256 of these files, and what was bad; written last: the shard is finished
        manifest.json       all of them, when all shards are finished

Row i of shard k is sample k * samples_per_shard + i of the source. As Parquet a shard is one file with a row a sample:
index, key, image, captions, text. A file has its name when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from clipx.data.loader import EvalBatch, ImageView, eval_batch_loader
from clipx.data.source import BadRecord, Source
from clipx.errors import DataError
from clipx.model.clip import CLIP
from clipx.model.tokenizer import Tokenizer
from clipx.precision.spec import Precision
from clipx.storage.local import ensure_folder, write_atomically
from clipx.storage.remote import StorageFolder, errors_as, is_local, local_path, retry

if TYPE_CHECKING:
    from numpy.typing import NDArray

PLAN, MANIFEST, VERSION = "embed.json", "manifest.json", 1
_FIX = "make room, or give another folder with out=…"

Record = dict[str, Any]
"""Of a finished shard: samples, captions, files {name: [bytes, SHA-256]}, bad [[key, reason], …]."""


def npy_files(number: int) -> tuple[str, str, str, str]:
    """(image, text, captions, offsets) of a shard."""
    image, text, captions, offsets = (f"{number:05d}.{part}.npy" for part in ("image", "text", "captions", "offsets"))
    return image, text, captions, offsets


def record_file(number: int) -> str:
    return f"{number:05d}.json"


def caption_hash(caption: str) -> int:
    """64 bits, by which a caption is found among those of its sample."""
    return int.from_bytes(hashlib.blake2b(caption.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


# ------------------------------------------------------------------------------------------------------- a place


class Place:
    """A folder, or what lies under a URL. Raises DataError where it cannot be read or written."""

    def __init__(self, out: str, retry_s: float) -> None:
        self.out, self._retry_s = out.rstrip("/"), retry_s
        self.folder = Path(local_path(out)).expanduser() if is_local(out) else None
        if self.folder is not None:
            ensure_folder(self.folder, f"out={out}", "give")

    def put(self, name: str, write: Callable[[str], object]) -> list[Any]:
        """A file, by `write` to a path of its own. Returns its bytes and SHA-256."""
        if self.folder is not None:
            write_atomically(self.folder / name, write, _FIX)
            return _facts(self.folder / name)
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary, name)
            write(str(path))
            self._asked(lambda: StorageFolder(self.out).put(path, name))
            return _facts(path)

    def text(self, name: str) -> str | None:
        """None where there is no such file."""
        try:
            if self.folder is not None:
                return (self.folder / name).read_text(encoding="utf-8")
            return str(self._asked(lambda: StorageFolder(self.out).read(name)), "utf-8")
        except FileNotFoundError:
            return None

    def sizes(self) -> dict[str, int]:
        """Of the files that are there, by name."""
        if self.folder is not None:
            return {path.name: path.stat().st_size for path in self.folder.iterdir() if path.is_file()}
        found: dict[str, int] = self._asked(lambda: StorageFolder(self.out).files())
        return found

    def holds(self, files: Mapping[str, Sequence[Any]], sizes: Mapping[str, int]) -> bool:
        """Whether files are as they were written: by their contents, of a URL by their sizes."""
        if any(sizes.get(name) != size for name, (size, _) in files.items()):
            return False
        return self.folder is None or all(_facts(self.folder / name) == list(facts) for name, facts in files.items())

    def _asked(self, call: Callable[[], Any]) -> Any:
        with errors_as(lambda said: DataError(f"out={self.out}: {said}"), FileNotFoundError):
            return retry(self.out, self._retry_s, call)


def _facts(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def finished(place: Place, numbers: Sequence[int]) -> dict[int, Record]:
    """The records of those shards that are there and as they were written."""
    sizes, found = place.sizes(), {}
    for number in numbers:
        if record_file(number) not in sizes:
            continue
        record = json.loads(place.text(record_file(number)) or "{}")
        if place.holds(record.get("files", {}), sizes) and record.get("files"):
            found[number] = record
    return found


# ----------------------------------------------------------------------------------------------------- embedding


@dataclass(slots=True)
class Shard:
    """What is known of a shard's samples so far, by their place in it."""

    samples: range
    image: list[Tensor | None] = field(default_factory=list)
    captions: list[Sequence[str]] = field(default_factory=list)
    text_mD: list[Tensor] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.image, self.captions = [None] * len(self.samples), [()] * len(self.samples)


@dataclass(frozen=True, slots=True)
class Writer:
    """Embeds the samples of a source as evaluation sees them, and writes them. `dtype`: a name NumPy knows."""

    model: CLIP
    device: torch.device
    precision: Precision
    tokenizer: Tokenizer
    source: Source
    view: ImageView
    samples_per_shard: int
    batch_size: int
    parquet: bool
    dtype: str
    place: Place

    def shards(self) -> int:
        return -(-sum(self.source.sizes) // self.samples_per_shard)

    def write(self, numbers: Sequence[int], workers: int, prefetch: int) -> Iterator[tuple[int, Record]]:
        """Each of these shards with its record, when it is finished."""
        batches = [part for number in numbers for part in self._batches(number)]
        loaded = iter(eval_batch_loader(self.source, self.view, batches, workers, prefetch))
        for number in numbers:
            shard = Shard(self._samples(number))
            for _ in self._batches(number):
                self._embed(next(loaded), shard)
            yield number, self._put(number, shard)

    def _samples(self, number: int) -> range:
        start = number * self.samples_per_shard
        return range(start, min(start + self.samples_per_shard, sum(self.source.sizes)))

    def _batches(self, number: int) -> list[range]:
        """Of a shard alone, so that what is in it depends on no other."""
        samples = self._samples(number)
        return [samples[at : at + self.batch_size] for at in range(0, len(samples), self.batch_size)]

    @torch.inference_mode()
    def _embed(self, held: EvalBatch, shard: Shard) -> None:
        shard.bad += held.bad
        if not held.index:
            return
        image_mD = self._call(self.model.encode_image, held.image)
        for index, row_D, captions in zip(held.index, image_mD, held.captions, strict=True):
            shard.image[index - shard.samples.start] = row_D
            shard.captions[index - shard.samples.start] = captions
        texts = [caption for captions in held.captions for caption in captions]
        for at in range(0, len(texts), self.batch_size):
            tokens_bL = self.tokenizer(texts[at : at + self.batch_size])
            shard.text_mD.append(self._call(self.model.encode_text, tokens_bL))

    def _call(self, encode: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        with self.precision.autocast():
            return encode(batch.to(self.device)).cpu()

    def _put(self, number: int, shard: Shard) -> Record:
        missing_D = torch.full((self.model.embed_dim,), torch.nan)
        image_nD = torch.stack([missing_D if row is None else row for row in shard.image])
        text_mD = torch.cat([*shard.text_mD, torch.empty(0, self.model.embed_dim)])
        image, text = (x.numpy().astype(self.dtype) for x in (image_nD, text_mD))
        put = self._put_parquet if self.parquet else self._put_npy
        record = {
            "samples": len(shard.samples),
            "captions": len(text),
            "files": put(number, shard, image, text),
            "bad": [[bad.key, bad.reason] for bad in shard.bad],
        }
        put_json(self.place, record_file(number), record)
        return record

    def _put_npy(self, number: int, shard: Shard, image: NDArray[Any], text: NDArray[Any]) -> dict[str, list[Any]]:
        hashes = [caption_hash(caption) for captions in shard.captions for caption in captions]
        arrays = (image, text, np.array(hashes, dtype=np.uint64), _offsets(shard))
        return {
            name: self.place.put(name, partial(_save, array=array))
            for name, array in zip(npy_files(number), arrays, strict=True)
        }

    def _put_parquet(self, number: int, shard: Shard, image: NDArray[Any], text: NDArray[Any]) -> dict[str, list[Any]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        def vectors(rows: NDArray[Any], missing: Any = None) -> Any:
            return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), self.model.embed_dim, mask=missing)

        missing = pa.array([row is None for row in shard.image])
        table = pa.table(
            {
                "index": pa.array(shard.samples, pa.int64()),
                "key": pa.array([self.source.key(index) for index in shard.samples]),
                "image": vectors(image, missing),
                "captions": pa.array(shard.captions, pa.list_(pa.string())),
                "text": pa.ListArray.from_arrays(pa.array(_offsets(shard), pa.int32()), vectors(text)),
            }
        )
        name = f"{number:05d}.parquet"
        return {name: self.place.put(name, lambda path: pq.write_table(table, path, use_dictionary=False))}


def _offsets(shard: Shard) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, shard.captions)], dtype=np.int64)


def _save(path: str, array: NDArray[Any]) -> None:
    with Path(path).open("wb") as file:
        np.save(file, array, allow_pickle=False)


def put_json(place: Place, name: str, value: Any) -> None:
    text = json.dumps(value, indent=1, sort_keys=True) + "\n"
    place.put(name, lambda path: Path(path).write_text(text, encoding="utf-8"))
