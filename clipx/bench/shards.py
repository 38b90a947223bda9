"""Shards of synthetic photographs with captions whose lengths are those of captions from the web."""

from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from clipx.bench.pipelines import photograph
from clipx.bench.training import MEDIAN, SPREAD
from clipx.data.shards.write import ShardSample, write_samples
from clipx.distributed.launch_env import cores

SHARDS = 8
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


def write(folder: Path, samples: int, side: int, seed: int) -> None:
    """Writes the shards, JPEGs of width `side` and aspect 4:3, in as many processes as there are cores."""
    if samples * side**2 < _FEW_PIXELS:
        for shard in range(SHARDS):
            _write_shard(folder, shard, samples, side, seed)
        return
    with ProcessPoolExecutor(min(SHARDS, cores()), mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_write_shard, folder, shard, samples, side, seed) for shard in range(SHARDS)]:
            done.result()


def caption(rng: random.Random) -> str:
    """Returns random words. Their number is log-normal, as that of `clipx.bench.training.captions`."""
    return " ".join(rng.choices(_WORDS, k=max(1, round(MEDIAN * rng.lognormvariate(0, SPREAD)))))


def caption_of(seed: int, i: int) -> str:
    """Returns the caption of sample i."""
    return caption(random.Random(f"{seed}/{i}"))


def _write_shard(folder: Path, shard: int, samples: int, side: int, seed: int) -> None:
    written: list[ShardSample] = []
    for i in range(shard, samples, SHARDS):
        text = caption_of(seed, i).encode()
        written.append({"__key__": f"{i:09d}", "jpg": photograph((side, side * 3 // 4), seed + i), "txt": text})
    write_samples(f"{folder}/{shard:04d}.tar", written)


def mean_tokens(samples: int, context: int, seed: int) -> float:
    """Returns the mean number of tokens of the captions that `write` writes, start and end included."""
    return sum(min(context, 2 + len(caption_of(seed, i).split())) for i in range(samples)) / samples
