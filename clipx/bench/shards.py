"""Shards of synthetic photographs with captions whose lengths are those of captions from the web."""

from __future__ import annotations

import io
import random
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

from clipx.data.shards.write import ShardSample, write_samples
from clipx.distributed.launch_env import cores
from clipx.processes import start_in_child

SHARDS = 8
MEDIAN, SPREAD = 12, 0.6  # tokens of a caption without start and end; standard deviation of their logarithm
_FEW_PIXELS = 10_000_000  # take less time than the start of processes
# Each word is one token of CLIP's vocabulary.
_TEXT = (
    "a photo of the small red house lake on morning with green white car and dog in front street man woman black water "
    "tree old stone bridge city night snow mountain blue sky table food bird two people near beach"
)
_WORDS = tuple(_TEXT.split())


def pattern(folder: Path) -> str:
    """Returns the pattern of the shards in `folder`, for clipx and for open_clip."""
    return f"{folder}/{{0000..{SHARDS - 1:04d}}}.tar"


def caption_of(seed: int, i: int) -> str:
    """Returns random words. Their number is log-normal, as that of `contenders.captions`."""
    rng = random.Random(f"{seed}/{i}")
    return " ".join(rng.choices(_WORDS, k=max(1, round(MEDIAN * rng.lognormvariate(0, SPREAD)))))


def photograph(size: tuple[int, int], seed: int) -> bytes:
    """Returns a JPEG with quality 90 of width and height `size`. Like photographs it has smooth areas, edges and a
    little grain; about 0.25 bytes per pixel."""
    rng = np.random.default_rng(seed)
    side = size[0]
    image = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    for _ in range(12):  # objects with edges
        left, top = (int(rng.integers(0, length)) for length in size)
        width, height = (int(rng.integers(side // 20, side // 4)) for _ in range(2))
        patch = Image.fromarray(rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)).resize((width, height))
        image.paste(patch, (left, top))
    grain = rng.normal(0, 3, (size[1], size[0], 1))
    out = io.BytesIO()
    Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def write(folder: Path, samples: int, side: int, seed: int) -> None:
    """Writes the shards, JPEGs of width `side` and three quarters of its height, in as many processes as there are
    cores."""
    write_shard = partial(_write_shard, folder, samples, (side, side * 3 // 4), seed)
    if samples * side**2 < _FEW_PIXELS:
        list(map(write_shard, range(SHARDS)))
        return
    with ProcessPoolExecutor(min(SHARDS, cores()), mp_context=get_context("spawn"), initializer=start_in_child) as pool:
        list(pool.map(write_shard, range(SHARDS)))


def _write_shard(folder: Path, samples: int, size: tuple[int, int], seed: int, shard: int) -> None:
    written: list[ShardSample] = [
        {"__key__": f"{i:09d}", "jpg": photograph(size, seed + i), "txt": caption_of(seed, i).encode()}
        for i in range(shard, samples, SHARDS)
    ]
    write_samples(f"{folder}/{shard:04d}.tar", written)


def mean_tokens(samples: int, context: int, seed: int) -> float:
    """Returns the mean number of tokens of the captions that `write` writes, start and end included."""
    return sum(min(context, 2 + len(caption_of(seed, i).split())) for i in range(samples)) / samples
