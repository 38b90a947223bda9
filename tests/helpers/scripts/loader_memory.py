"""Memory of a long run's processes: `python loader_memory.py FOLDER [leak]` loads a million samples with two workers.

Prints a JSON list: every 10,000 samples, the anonymous memory in bytes of each worker and of this process. With `leak`
a source stores a number of each sample that it reads. FOLDER: for the indices of shards.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from clipx.data.images import PixelReader
from clipx.data.loader import LoaderOptions, TrainBatches, train_loader
from clipx.data.order import Order
from clipx.data.shards.index import load_table
from clipx.data.source import BadRecord, Sample
from clipx.data.texts import TextReader
from clipx.model.tokenizer import Tokenizer

SHARDS, PER_SHARD = 40_000, 10_000
BATCH, TOTAL = 1000, 1_000_000


@dataclass(frozen=True)
class FakeSource:
    """A source of any number of samples, each with an empty image and a unique caption."""

    sizes: Sequence[int]
    folder: str
    leak: bool = False
    bad: Sequence[BadRecord] = ()
    fingerprint: str = "stand-in"
    stored: list[int] = field(default_factory=list)

    def key(self, index: int) -> str:
        return f"sample {index}"

    def read(self, index: int) -> Sample:
        shard, row = divmod(index, PER_SHARD)
        assert load_table(table_of(self.folder, shard))[row, 0, 0] == 0
        if self.leak:
            self.stored.append(index)
        return Sample(b"", [f"a picture of number {index}, and of {index * 7919 % 1_000_003}"])


@lru_cache(maxsize=16)
def table_of(folder: str, shard: int) -> str:
    """Returns the path of a shard's index.

    A Path for each sample would be seen in the memory: pathlib interns its parts, and Python's table of interned
    strings, several MiB, is copied to new memory when it is full.
    """
    return str(write_sparse_index(Path(folder) / f"{shard}.npy"))


def write_sparse_index(path: Path) -> Path:
    """Writes an index of PER_SHARD samples as a sparse file: a header, and zeros that take no disk space."""
    if not path.exists():
        with (part := path.with_suffix(f".{os.getpid()}")).open("wb") as file:
            shape = {"descr": "<i8", "fortran_order": False, "shape": (PER_SHARD, 4, 2)}
            np.lib.format.write_array_header_1_0(file, shape)
            file.truncate(file.tell() + 64 * PER_SHARD)
        part.replace(path)  # atomic: loader processes share the folder
    return path


def anonymous_memory(pid: int) -> int:
    """Returns the anonymous resident memory of a process in bytes, without shared memory and mapped files."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def main(folder: str, leak: bool) -> list[list[int]]:
    PixelReader.load = lambda *_: None  # type: ignore[assignment,method-assign,return-value]
    source = FakeSource([PER_SHARD] * SHARDS, folder, leak)
    order = Order(source.sizes, 0, 20_000)  # 50 windows: frequent changes make a trend visible
    start = SHARDS * PER_SHARD // 2
    stream = TrainBatches(source, order, PixelReader((2,), [1.0, 1.0], 1), TextReader(Tokenizer(16)), 0)
    loader = train_loader(stream, range(start, start + TOTAL), LoaderOptions(BATCH, workers=2))
    trend = []
    for step, loaded in enumerate(loader):
        assert len(loaded.index) == BATCH
        if step % 10 == 0:
            workers = sorted(child.pid or 0 for child in multiprocessing.active_children())
            trend.append([anonymous_memory(pid) for pid in (*workers, os.getpid())])
    return trend


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2:] == ["leak"])))
