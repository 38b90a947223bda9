"""Samples that clipx makes itself, written once as WebDataset shards: with progress, atomically, reused afterwards."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from rich.progress import track

from clipx.data.source import Sample

MakeSample = Callable[[int], Sample]


def cache_root() -> Path:
    """Where written shards and indices live: CLIPX_CACHE, else clipx in the user's cache folder."""
    if root := os.environ.get("CLIPX_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipx"


def ensure_shards(folder: Path, make: MakeSample, samples: int, per_shard: int, what: str) -> list[str]:
    """The shards under `folder`, written first if they are not there: sample i of `samples` is `make(i)`.

    Written to a temporary folder that is renamed when whole, so that a folder with the right name is a whole one.
    Processes that write at the same time do the same work twice, and the first to finish wins.
    """
    count = -(-samples // per_shard)
    names = [f"{i:06d}.tar" for i in range(count)]
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial_folder = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            ranges = [range(i * per_shard, min(samples, (i + 1) * per_shard)) for i in range(count)]
            _write_all(partial_folder, names, ranges, make, what)
            partial_folder.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)
    return [str(folder / name) for name in names]


def _write_all(folder: Path, names: list[str], ranges: list[range], make: MakeSample, what: str) -> None:
    write = partial(_write_shard, make=make)
    paths = [str(folder / name) for name in names]
    with ProcessPoolExecutor(min(len(names), os.cpu_count() or 1)) as pool:
        done = pool.map(write, paths, ranges)
        for _ in track(done, f"writing {what}", len(names), disable=not sys.stderr.isatty()):
            pass


def _write_shard(path: str, indices: range, make: MakeSample) -> None:
    from webdataset import TarWriter

    with TarWriter(path, mtime=0, encoder=False) as shard:  # mtime: the same samples give the same bytes
        for index in indices:
            sample = make(index)
            meta = {"captions": list(sample.captions), "label": sample.label}
            shard.write(
                {
                    "__key__": f"{index:09d}",
                    "jpg": sample.image,
                    "txt": sample.captions[0].encode(),
                    "json": json.dumps(meta).encode(),
                }
            )
