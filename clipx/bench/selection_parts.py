"""Files and measured processes of `clipx.bench selection`."""

from __future__ import annotations

import os
import pickle
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipx.bench.measure import resident
from clipx.bench.processes import Processes
from clipx.distributed.comm import Comm

_MIB = 2**20
_POLL_S = 0.01
_POSITIONS = range(0, 4_000_000, 97)  # of several shuffle windows
_WHERE = "similarity >= 0.5"
_GROUP = 1 << 20  # rows of a row group


@dataclass(frozen=True, slots=True)
class Start:
    """A first start, which makes the selection, and a later one. `own`: peak of anonymous memory beyond that before.

    `resident`: peak with the pages of mapped files, which the system can take back. `worker`: a loader process of the
    later start.
    """

    selected: int
    first_s: float
    first_cpu_s: float
    first_own_mib: float
    first_resident_mib: float
    worker_own_mib: float
    pickled_mib: float
    cache_mib: float
    later_s: float = 0.0
    later_own_mib: float = 0.0

    def with_later(self, later: Start) -> Start:
        return replace(
            self, later_s=later.first_s, later_own_mib=later.first_own_mib, worker_own_mib=later.worker_own_mib
        )


# ------------------------------------------------------------------------------------------------------- files


def options(folder: str, uids: bool) -> dict[str, dict[str, Any]]:
    """Returns the options of data by the name of the case."""
    mask, table = f"{folder}/mask.npy", f"{folder}/table.parquet"
    every = {"keep": mask, "where": _WHERE, "table": table, "weights": f"{folder}/weights.npy"}
    found: dict[str, dict[str, Any]] = {
        "all samples": {},
        "keep: true and false": {"keep": mask},
        "keep: indices": {"keep": f"{folder}/indices.npy"},
        "keep: indices in random order": {"keep": f"{folder}/drawn.npy"},
        "where: table in order": {"where": _WHERE, "table": table},
        "weights": {"weights": f"{folder}/weights.npy"},
        "keep, where and weights": every,
    }
    if uids:
        found["keep: uids, tables of the shards"] = {"keep": f"{folder}/uids.npy", "table": "shards"}
    return found


def write_inputs(comm: Comm, folder: str, shards: int, per_shard: int, uids: bool, seed: int) -> None:
    """Writes files that select half of the samples, in parts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    samples, half, out = shards * per_shard, shards * per_shard // 2, Path(folder)
    indices = _array(out / "indices.npy", "<i8", half)
    drawn = _array(out / "drawn.npy", "<i8", half)
    mask = _array(out / "mask.npy", bool, samples)
    weights = _array(out / "weights.npy", "<f4", samples)
    with pq.ParquetWriter(out / "table.parquet", pa.schema({"similarity": pa.float32()})) as table:
        for start in range(0, samples, _GROUP):
            rng, part = np.random.default_rng((seed, 0, start)), slice(start, min(samples, start + _GROUP))
            similarity = rng.random(part.stop - start, dtype=np.float32)
            table.write_table(pa.table({"similarity": similarity}), row_group_size=_GROUP)
            mask[part], weights[part] = np.arange(start, part.stop) % 2 == 0, similarity + 0.01
            halves = slice(start // 2, min(half, part.stop // 2))
            indices[halves] = 2 * np.arange(halves.start, halves.stop)
            drawn[halves] = 2 * rng.integers(half, size=halves.stop - halves.start)
    if uids:
        _write_uids(out, shards, per_shard, seed)


def _array(path: Path, dtype: Any, count: int) -> NDArray[Any]:
    """Creates a .npy file that is mapped into memory."""
    return np.lib.format.open_memmap(path, "w+", dtype, (count,))  # type: ignore[no-untyped-call, no-any-return]


def _write_uids(out: Path, shards: int, per_shard: int, seed: int) -> None:
    """Writes a Parquet file of uids for each shard, and the sorted uids of every second sample, as DataComp does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from clipx.data.selection.ids import ID, Ids, write_sorted

    def chunks() -> Iterator[tuple[Ids, None]]:
        for shard in range(shards):
            numbers = np.random.default_rng((seed, 1, shard)).integers(2**64, size=(per_shard, 2), dtype=np.uint64)
            digits = numbers.astype(">u8").tobytes().hex().encode()
            ends = np.arange(0, 32 * per_shard + 1, 32, dtype=np.int32)
            texts = pa.StringArray.from_buffers(per_shard, pa.py_buffer(ends), pa.py_buffer(digits))
            pq.write_table(pa.table({"uid": texts}), out / f"{shard:06d}.parquet", use_dictionary=False)
            yield numbers.view(ID).ravel()[::2], None

    write_sorted(str(out / "uids.npy"), chunks())


# --------------------------------------------------------------------------------------------------- processes


@dataclass(slots=True)
class _Memory:
    """Peaks beyond the memory before, in bytes."""

    own: int = 0
    resident: int = 0


@contextmanager
def _peaks() -> Iterator[_Memory]:
    """Reads the resident memory of this process in intervals, for there is no high-water mark of anonymous memory."""
    before, found, done = (resident("RssAnon"), resident("VmRSS")), _Memory(), threading.Event()

    def read() -> None:
        found.own = max(found.own, resident("RssAnon") - before[0])
        found.resident = max(found.resident, resident("VmRSS") - before[1])

    def poll() -> None:
        while not done.wait(_POLL_S):
            read()

    reader = threading.Thread(target=poll, daemon=True)
    reader.start()
    try:
        yield found
    finally:
        done.set()
        reader.join()
        read()


def start(
    comm: Comm, cache: str, folder: str, shards: int, per_shard: int, chosen: dict[str, Any], later: bool
) -> Start:
    """Opens the data in this process, and in a later start reads the order of samples in a worker."""
    from clipx.data.selection import choose  # noqa: F401  # imports are no part of the measurement
    from clipx.data.webdataset import WebDatasetSpec

    os.environ["CLIPX_CACHE"] = cache
    urls = f"{folder}/{{000000..{shards - 1:06d}}}.tar"
    spec = WebDatasetSpec(name="bench", shards=urls, samples_per_shard=per_shard, held_out_share=0.0, **chosen)
    with _peaks() as memory:
        begin, cpu = time.perf_counter(), _cpu_s()
        train = spec.open().train
        took, cpu_took = time.perf_counter() - begin, _cpu_s() - cpu
    pickled = pickle.dumps((spec, train))
    (worker,) = Processes("cpu", 1).run(_worker, pickled) if later else (0,)
    files = [path for path in Path(cache).rglob("*") if path.is_file()]
    return Start(
        selected=sum(train.sizes),
        first_s=took,
        first_cpu_s=cpu_took,
        first_own_mib=memory.own / _MIB,
        first_resident_mib=memory.resident / _MIB,
        worker_own_mib=worker / _MIB,
        pickled_mib=len(pickled) / _MIB,
        cache_mib=sum(path.stat().st_size for path in files) / _MIB,
    )


def _worker(comm: Comm, pickled: bytes) -> int:
    """Finds the samples at positions of the training order as a loader worker does. Returns its own memory."""
    from clipx.data.selection.selected import Selected
    from clipx.data.webdataset import WebDatasetSpec  # noqa: F401  # imports are no part of the measurement

    with _peaks() as memory:
        spec, train = pickle.loads(pickled)
        order = spec.order(train, 0)
        for position in _POSITIONS:
            index = order(position)
            if isinstance(train, Selected):
                train.indices.load()[index]
    return memory.own


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
