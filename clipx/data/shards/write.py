"""Writes shards, in parallel and reproducibly. Generated data sets, the indices of shards and `prepare` use it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from clipx.data.source import Sample
from clipx.errors import DataError
from clipx.processes import (
    Environment,
    blocked_sigterm,
    first_death,
    processes_of,
    start_in_child,
)
from clipx.storage.local import cache_folder, write_atomically

MakeSample = Callable[[int], Sample]

ShardSample = dict[str, str | bytes]
"""A sample as webdataset represents it: `__key__`, its name, and the content of each member by extension."""

T = TypeVar("T")


def ensure_shards(folder: str, make: MakeSample, samples: int, per_shard: int, what: str) -> list[str]:
    """Returns the paths of the shards in a folder of the cache. Writes the missing ones, with `what` as the name of the
    data.

    Sample i in 0..samples-1 is `make(i)`. It depends on i only, so any shard can be written again. `make` is pickled.
    """
    root = cache_folder(folder)
    starts = range(0, samples, per_shard)
    paths = {root / f"{i:06d}.tar": range(start, min(samples, start + per_shard)) for i, start in enumerate(starts)}
    missing = [(path, indices) for path, indices in paths.items() if not path.is_file()]
    if missing:
        import webdataset  # noqa: F401  # imported once, before the worker processes start
    run_in_pool(partial(_write_shard, make=make), missing, f"writing {what}")
    return [str(path) for path in paths]


def run_in_pool(
    call: Callable[[T], object], items: list[T], what: str, *, processes: int = 0, threads: int = 0
) -> None:
    """Calls `call` on each item in parallel and shows progress on stderr. Raises the exceptions of `call`, and
    DataError if a process is killed."""
    from clipx.report.console import track

    if not items:
        return
    number = min(len(items), threads or processes or len(os.sched_getaffinity(0)))
    own: Mapping[int, BaseProcess] = {}
    start = (None, _start, (Environment(),))
    try:
        with ThreadPoolExecutor(number) if threads else ProcessPoolExecutor(number, *start) as pool:
            if isinstance(pool, ProcessPoolExecutor):
                own = processes_of(pool)
            with blocked_sigterm():
                results = pool.map(call, items)
            for _ in track(results, what, len(items), "shards"):
                pass
    except BrokenProcessPool:
        raise DataError(
            f"{what}: a process {first_death(own, 'start fewer processes')}; run the command again, and it continues "
            "with the missing shards"
        ) from None


def _start(_environment: Environment) -> None:
    """Starts a process of a pool, which the pool ends by SIGTERM."""
    start_in_child()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _write_shard(item: tuple[Path, range], make: MakeSample) -> None:
    path, indices = item
    write_atomically(path, lambda temporary: write_samples(temporary, _samples(indices, make)))


def _samples(indices: range, make: MakeSample) -> Iterator[ShardSample]:
    for index in indices:
        sample = make(index)
        meta = {"captions": list(sample.captions), "label": sample.label}
        yield {
            "__key__": f"{index:09d}",
            "jpg": sample.image,
            "json": json.dumps(meta).encode(),
            "txt": sample.captions[0].encode(),
        }


def write_samples(path: str, samples: Iterable[ShardSample]) -> None:
    """Writes a shard by webdataset's TarWriter: the members of a sample in the order of their extensions."""
    from webdataset import TarWriter

    with Path(path).open("xb") as file, TarWriter(file, user="", group="", mtime=0, encoder=False) as writer:
        for sample in samples:
            writer.write(sample)
