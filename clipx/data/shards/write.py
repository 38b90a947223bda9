"""Writes shards, in parallel and reproducibly. Generated data sets, the indices of shards and `prepare` use it."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import TypeVar

from clipx.data.source import Sample
from clipx.errors import DataError
from clipx.storage.local import cache_folder, write_atomically

MakeSample = Callable[[int], Sample]
T = TypeVar("T")

_PROGRESS_EVERY = 30.0  # seconds between progress lines if stderr is not a terminal


def ensure_shards(folder: str, make: MakeSample, samples: int, per_shard: int, what: str) -> list[str]:
    """Returns the paths of the shards in a folder of the cache. Writes the missing ones.

    Sample i in 0..samples-1 is `make(i)`. It depends on i only, so any shard can be written again at any time.

    Args:
        folder: name of the folder in the cache.
        make: function from an index to a sample. Must be picklable.
        samples: number of samples.
        per_shard: samples in each shard, fewer in the last one.
        what: name of the data, for progress messages.
    """
    root = cache_folder(folder)
    starts = range(0, samples, per_shard)
    paths = {root / f"{i:06d}.tar": range(start, min(samples, start + per_shard)) for i, start in enumerate(starts)}
    missing = [(path, indices) for path, indices in paths.items() if not path.is_file()]
    run_in_pool(partial(_write_shard, make=make), missing, f"writing {what}")
    return [str(path) for path in paths]


def run_in_pool(
    call: Callable[[T], object], items: list[T], what: str, *, processes: int = 0, threads: int = 0
) -> None:
    """Calls `call` on each item in parallel and shows progress on stderr.

    Uses `threads` threads of this process if given, else `processes` processes, else as many processes as there are
    cores. Raises the exceptions of `call`, and DataError if a process is killed.
    """
    if not items:
        return
    number = threads or processes or len(os.sched_getaffinity(0))
    make_pool = ThreadPoolExecutor if threads else ProcessPoolExecutor
    try:
        with make_pool(min(len(items), number)) as pool:
            for _ in _with_progress(pool.map(call, items), what, len(items)):
                pass
    except BrokenProcessPool:
        raise DataError(
            f"{what}: a process was killed, probably because memory ran out: run the command again, and it continues "
            "with the missing shards"
        ) from None


def _with_progress(done: Iterable[object], what: str, total: int) -> Iterator[object]:
    """Yields the items of `done` and shows a progress bar on a terminal, else a line every 30 seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(done, what, total, console=Console(stderr=True))
        return
    reported = time.monotonic()
    print(f"{what}: {total:,} shards", file=sys.stderr, flush=True)
    for count, item in enumerate(done, start=1):
        if time.monotonic() - reported > _PROGRESS_EVERY:
            reported = time.monotonic()
            print(f"{what}: {count:,} of {total:,} shards", file=sys.stderr, flush=True)
        yield item


def _write_shard(item: tuple[Path, range], make: MakeSample) -> None:
    path, indices = item
    write_atomically(path, lambda temporary: write_members(temporary, _members(indices, make)))


def _members(indices: range, make: MakeSample) -> Iterator[tuple[str, bytes]]:
    for index in indices:
        sample = make(index)
        meta = {"captions": list(sample.captions), "label": sample.label}
        yield f"{index:09d}.jpg", sample.image
        yield f"{index:09d}.json", json.dumps(meta).encode()
        yield f"{index:09d}.txt", sample.captions[0].encode()


def write_members(path: str, members: Iterable[tuple[str, bytes]]) -> None:
    """Writes a tar with the layout of webdataset's ShardWriter.

    Members have no modification time, so the same samples result in the same bytes.
    """
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
