"""First batch after a resume in the middle of an epoch of a large set: time, and memory of each process."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.bench.findings import Findings, Table, rounded
from clipx.bench.processes import Processes
from clipx.bench.spec import BenchSpec
from clipx.config.registry import option
from clipx.distributed.comm import Comm
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.data.loader_pool import LoaderPool
    from clipx.data.source import Source
    from clipx.data.views import View

_READ = ("range", "stream")
_SIDE = 64  # pixels of the photographs: the measurement is of shards and samples, not of decoding
_PIXELS = 224
_PARTS = ("open", "order", "first_batch", "total", "cpu", "own", "shared")
_EVALUATIONS = 3


@option("bench")
@dataclass(kw_only=True, slots=True)
class ResumeSpec(BenchSpec):
    """First batch after a resume: shards with a manifest, in the middle of an epoch. Each shard is a hard link to one
    tar file, so that 400 million samples take the disk space of 10,000."""

    kind: str = "resume"
    """Name of this benchmark in the registry."""

    shards: int = 41408
    """Number of shards, at least 2. The default is that of LAION-400M."""

    per_shard: int = 10000
    """Number of samples in a shard. At least 1. The default is that of img2dataset."""

    read: list[str] = field(default_factory=lambda: list(_READ))
    """Values of data.read to measure, of range and stream. Each is measured twice: with shards that no run has indexed
    on this machine, and then with their indices in the cache, as after a restart on the same machine."""

    batch: int = 256
    """Number of samples in a batch. At least 2."""

    workers: int = 2
    """Number of loader processes. At least 1."""

    trainer_gb: float = 2.0
    """Memory in GB that the trainer has written before an evaluation, of which each fork copies the page tables. 0 or
    more."""

    def __post_init__(self) -> None:
        BenchSpec.__post_init__(self)
        self.check_counts("per_shard", "workers")
        require(self.shards >= 2, f"shards={self.shards} must be at least 2: one in twenty is held out")
        require(self.batch >= 2, f"batch={self.batch} must be at least 2")
        require(self.trainer_gb >= 0, f"trainer_gb={self.trainer_gb:g} is negative: give 0 or more")
        require(
            bool(self.read) and set(self.read) <= set(_READ),
            f"read={self.read} must name values of data.read to measure: [range], [stream] or [range,stream]",
        )
        require(
            self.shards * self.per_shard >= 4 * self.batch,
            f"shards={self.shards} of per_shard={self.per_shard} samples are less than four batches of {self.batch}",
        )

    def run(self, log: Callable[[str], None]) -> Findings:
        found: dict[str, dict[str, float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            log(f"writing one shard of {self.per_shard:,} samples, and {self.shards:,} links to it")
            processes = Processes("cpu", self.threads)
            processes.run(write_links, folder, self.shards, self.per_shard, self.seed)
            for read in self.read:
                for index in ("new", "cached"):
                    log(f"data.read={read}, {index} indices")
                    cache = f"{folder}/cache-{read}"
                    middle = self.shards * self.per_shard // 2
                    load = (folder, cache, read, middle, self.batch, self.workers, self.seed, self.trainer_gb)
                    found[f"{read}, {index} indices"] = processes.run(first_batch, *load)[0]
        return self._findings(found)

    def _findings(self, found: Mapping[str, Mapping[str, float]]) -> Findings:
        names = list(found)
        seconds = Table(f"{self.shards * self.per_shard:,} samples in {self.shards:,} shards: seconds", ("", *names))
        labels = {
            "open": "open the data",
            "order": "build the order and the loader",
            "first_batch": "first batch",
            "total": "all of it",
            "cpu": "all of it, CPU time of all processes",
            "own": "an evaluation of two batches by new processes",
            "shared": "the same by the processes of training",
        }
        seconds.rows += [(labels[part], *(f"{found[name][part]:.2f}" for name in names)) for part in _PARTS]
        memory = Table("MB of the process alone, after the first batch", ("", *names))
        memory.rows += [
            ("trainer", *(f"{found[name]['trainer_mb']:.0f}" for name in names)),
            ("largest loader process", *(f"{found[name]['worker_mb']:.0f}" for name in names)),
            ("the same, at its peak at most", *(f"{found[name]['worker_peak_mb']:.0f}" for name in names)),
        ]
        worst = {key: max(one[key] for one in found.values()) for key in ("total", "cpu", "worker_peak_mb")}
        figures = {"samples": self.shards * self.per_shard, "shards": self.shards, "workers": self.workers, **worst}
        return Findings(figures, found, [seconds, memory])


def write_links(comm: Comm, folder: str, shards: int, per_shard: int, seed: int) -> None:
    """Writes one shard of photographs, links to it as all others, and a manifest without digests."""
    from clipx.bench.pipelines import photograph
    from clipx.data.shards.write import write_samples

    images = [photograph((_SIDE, _SIDE), seed + i) for i in range(16)]
    one = Path(folder) / "00000.tar"
    write_samples(
        str(one),
        [
            {"__key__": f"{i:09d}", "jpg": images[i % len(images)], "txt": f"photograph {i}".encode()}
            for i in range(per_shard)
        ],
    )
    paths = [f"{folder}/{i:05d}.tar" for i in range(shards)]
    for path in paths[1:]:
        Path(path).hardlink_to(one)
    listed = [{"url": path, "samples": per_shard} for path in paths]
    (Path(folder) / "manifest.json").write_text(json.dumps({"caption_key": "txt", "shards": listed}))


def first_batch(
    comm: Comm, folder: str, cache: str, read: str, position: int, batch: int, workers: int, seed: int, held_gb: float
) -> dict[str, float]:
    """Returns the seconds to the first batch from a position of the stream, and the memory of the processes in MB."""
    import multiprocessing

    import numpy as np

    from clipx.bench.pipelines import fork_workers
    from clipx.data.loader import train_loader
    from clipx.data.loader_pool import LoaderPool
    from clipx.data.spec import open_data, training_order
    from clipx.data.views import ImageView
    from clipx.data.webdataset import WebDatasetSpec
    from clipx.model.tokenizer import Tokenizer

    os.environ["CLIPX_CACHE"] = cache
    fork_workers()
    tokenizer = Tokenizer(77)
    begin, cpu = time.perf_counter(), time.process_time()
    spec = WebDatasetSpec(name="resume", manifest=f"{folder}/manifest.json", read=read, batch_size=batch)
    dataset = open_data(spec)
    opened = time.perf_counter()
    assert dataset.held_out is not None
    order = training_order(spec, dataset, seed, ranks=1)
    start = position // batch * batch
    view = ImageView(_PIXELS, spec.crop_scale, spec.max_pixels)
    pool = LoaderPool(workers, spec.prefetch, False, [dataset.train, dataset.held_out, order, tokenizer])
    loader = train_loader(
        *(dataset.train, order, view, tokenizer),
        seed=seed,
        samples=range(start, start + 10**6 * batch),
        batch=batch,
        rank=0,
        world=1,
        workers=workers,
        prefetch=spec.prefetch,
        pin=False,
        pool=pool,
    )
    ordered = time.perf_counter()
    batches = iter(loader)
    next(batches)
    end = time.perf_counter()
    children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    used = [_memory(pid) for pid in children]
    cpu = time.process_time() - cpu + sum(map(_cpu_seconds, children))
    trainer_mb = _memory(os.getpid())[0]
    evaluate = partial(_evaluation, dataset.held_out, view, batch, workers)
    held = np.ones(int(held_gb * 1e9 / 8))  # written, so that it has pages
    evaluate(pool)  # indexes the shards
    seconds = [(evaluate(None), evaluate(pool)) for _ in range(_EVALUATIONS)]
    del held
    pool.close()
    own, shared = (statistics.median(found) for found in zip(*seconds, strict=True))
    return {
        "open": rounded(opened - begin),
        "order": rounded(ordered - opened),
        "first_batch": rounded(end - ordered),
        "total": rounded(end - begin),
        "cpu": rounded(cpu),
        "own": rounded(own),
        "shared": rounded(shared),
        "trainer_mb": rounded(trainer_mb),
        "worker_mb": rounded(max(alone for alone, _ in used)),
        "worker_peak_mb": rounded(max(peak for _, peak in used)),
    }


def _evaluation(source: Source, view: View, batch: int, workers: int, pool: LoaderPool | None) -> float:
    """Returns the seconds that two batches of an evaluation take."""
    from clipx.data.loader import eval_batch_loader

    start = time.perf_counter()
    for _ in eval_batch_loader(source, view, [range(batch), range(batch, 2 * batch)], workers, 2, pool):
        pass
    return time.perf_counter() - start


def _memory(pid: int) -> tuple[float, float]:
    """Returns the memory that a process does not share, and an upper bound of its peak, in MB.

    The bound adds the difference of the peak and the current resident memory, which may contain shared memory.
    """
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(text.split()[0]) for name, text in (line.split(":", 1) for line in lines)}
    alone = kib["Private_Clean"] + kib["Private_Dirty"]
    peak = alone + int(status["VmHWM"].split()[0]) - kib["Rss"]
    return alone / 1e3, peak / 1e3


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
