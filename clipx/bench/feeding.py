"""Measuring process of the benchmark `feeds`: writes shards of each kind, and loads them in turns in one thread."""

from __future__ import annotations

import io
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from clipx.bench.decoding import WorkerView
from clipx.bench.pipelines import photograph
from clipx.bench.shards import caption_of
from clipx.data.batch import Batch
from clipx.data.loader import TrainBatches
from clipx.data.order import Order
from clipx.data.prepare.resize import shard_image
from clipx.data.prepare.spec import PrepareSpec, Resize
from clipx.data.shards.shards import Shards
from clipx.data.shards.write import ShardSample, write_samples
from clipx.data.shared_memory import copy_to_shared
from clipx.data.views import FeatureView, View
from clipx.distributed.comm import Comm
from clipx.model.tokenizer import Tokenizer

_SIZE, _CONTEXT, _CROP, _FEATURES = 224, 77, (0.9, 1.0), 768
_ORIGINAL = 1024  # width of the photographs that are prepared


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of shards: photographs of aspect 4:3, prepared photographs, or stored features."""

    label: str
    width: int = _ORIGINAL
    prepare: PrepareSpec | None = None


def _prepared(resize: Resize, size: int, quality: int) -> Kind:
    spec = PrepareSpec(source="photographs", out="shards", resize=resize, size=size, quality=quality)
    return Kind(f"prepared: resize={resize.value} size={size} quality={quality}", prepare=spec)


KINDS = {
    "original_1024": Kind("JPEG of 1024 x 768 pixels, quality 90"),
    "original_512": Kind("JPEG of 512 x 384 pixels, quality 90", 512),
    "original_256": Kind("JPEG of 256 x 192 pixels, quality 90", 256),
    "keep_ratio_256_q95": _prepared(Resize.keep_ratio, 256, 95),
    "keep_ratio_256_q90": _prepared(Resize.keep_ratio, 256, 90),
    "square_256_q90": _prepared(Resize.center_crop, 256, 90),
    "square_224_q90": _prepared(Resize.center_crop, 224, 90),
    "features": Kind(f"stored features, {_FEATURES} of float16"),
}


def microseconds(
    comm: Comm, folder: str, samples: int, rounds: int, seed: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns the CPU time of loading a sample in each round in microseconds, and the mean bytes of an image, by kind.

    Loading is reading, decoding, resizing, tokens and the copy to shared memory: the work of a loader process.
    """
    torch.set_num_threads(1)
    os.environ["CLIPX_CACHE"] = f"{folder}/cache"  # a benchmark must leave nothing in the user's cache
    sizes = {name: _write(Path(folder) / f"{name}.tar", kind, samples, seed) for name, kind in KINDS.items()}
    streams = {name: _stream(f"{folder}/{name}.tar", name, seed) for name in KINDS}
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    for round_ in range(rounds + 1):
        for name, stream in streams.items():
            start = time.process_time()
            batch = stream[range(samples)]
            assert isinstance(batch, Batch), batch
            copy_to_shared(batch.image if batch.image.ndim == 2 else batch.image.permute(0, 2, 3, 1))
            if round_:  # the first loads libraries and indices
                times[name].append((time.process_time() - start) / samples * 1e6)
    return times, sizes


def _write(path: Path, kind: Kind, samples: int, seed: int) -> float:
    """Writes a shard. Returns the mean bytes of an image."""
    sizes: list[int] = []

    def written() -> Iterator[ShardSample]:
        for i in range(samples):
            extension, encoded = _encoded(kind, seed + i)
            sizes.append(len(encoded))
            yield {"__key__": f"{i:09d}", extension: encoded, "txt": caption_of(seed, i).encode()}

    write_samples(str(path), written())
    return statistics.mean(sizes)


def _encoded(kind: Kind, seed: int) -> tuple[str, bytes]:
    if kind is KINDS["features"]:
        file = io.BytesIO()
        np.save(file, np.random.default_rng(seed).standard_normal(_FEATURES).astype(np.float16))
        return "npy", file.getvalue()
    encoded = photograph((kind.width, kind.width * 3 // 4), seed)
    return "jpg", encoded if kind.prepare is None else shard_image(encoded, kind.prepare).encoded


def _stream(path: str, name: str, seed: int) -> TrainBatches:
    source = Shards.open([path], "txt", None)
    view: View = FeatureView(_FEATURES) if name == "features" else WorkerView(_SIZE, _CROP, 10**8)
    return TrainBatches(source, Order(source.sizes, seed, 200_000), view, Tokenizer(_CONTEXT), seed)
