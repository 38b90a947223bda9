"""Changes that make the loader of a run faster, with the effect that its measured parts predict."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from clipx.bench.pipelines import rate_of_run, stream_of_run
from clipx.bench.processes import Processes
from clipx.bench.spec import Findings, Table
from clipx.data.batch import Batch
from clipx.data.images import Draw
from clipx.data.source import BadSample
from clipx.data.spec import open_data
from clipx.distributed.comm import Comm
from clipx.distributed.launch_env import cores
from clipx.errors import require
from clipx.logger import Row, read_rows
from clipx.run.directory import RunDir
from clipx.trainer.saved_run import open_run

if TYPE_CHECKING:
    from clipx.bench.loader import LoaderSpec
    from clipx.trainer.spec import RunSpec

PARTS = {
    "whole": "CPU time",
    "image": "of which decoding, crop and resizing",
    "wait": "waiting for storage, no CPU time",
}
"""Measured parts of a sample and their labels."""

_MARGIN = 1.1  # expected rate of a change by the rate that training consumes: measurements vary
_BOUND = 0.05  # share of the time that a run may wait for its loader
_GAIN = 1.05  # smallest gain that is worth a change


@dataclass(frozen=True, slots=True)
class Facts:
    """Measurements of the loader of one rank."""

    rate: float  # samples per second of the loader by itself, on this machine
    trained: float  # samples per second and device of training
    wait: float  # share of the time that training waited for the loader
    workers: int
    cores: int  # that this process may use
    us: Mapping[str, float]  # microseconds of each of PARTS
    size: int  # shorter side in pixels of images that suffice for the crops; 0: stored features
    remote: bool
    whole_shards: bool
    cache_gb: float  # data.cache_gb; 0 without a cache of shards

    @property
    def needed(self) -> float:
        """Samples per second that training would consume if it did not wait."""
        return self.trained / max(1 - self.wait, 0.01)

    @property
    def bound(self) -> bool:
        return self.wait > _BOUND


@dataclass(frozen=True, slots=True)
class Change:
    """A change, and the samples per second of the loader that are expected with it."""

    text: str
    rate: float


def changes(facts: Facts) -> list[Change]:
    """Returns the changes that are expected to make the loader faster, by decreasing rate."""
    found = [*_more_processes(facts), *_storage(facts)]
    useful = [change for change in found if change.rate >= _GAIN * facts.rate]
    return sorted(useful, key=lambda change: -change.rate)


def _more_processes(facts: Facts) -> list[Change]:
    """Processes that the cores, or more cores, allow. Those that wait for storage leave cores to others."""
    now = max(1, facts.workers)
    busy = facts.us["whole"] / (facts.us["whole"] + facts.us["wait"])  # share of a core that a process uses
    most = max(1, math.floor(facts.cores / busy))
    each = facts.rate / min(now, most)
    wanted = math.ceil(_MARGIN * facts.needed / each)
    found = []
    if min(wanted, most) > now:
        number = min(wanted, most)
        found.append(Change(f"data.workers={number}", each * number))
    if wanted > max(most, now):
        cores = math.ceil(wanted * busy)
        text = f"{cores} cores for each GPU, which has {facts.cores}, with data.workers={wanted}"
        found.append(Change(text, each * wanted))
    return found


def _storage(facts: Facts) -> list[Change]:
    us = facts.us
    if us["wait"] < 0.2 * (us["whole"] + us["wait"]):
        return []
    if facts.remote and not facts.whole_shards:
        text = "data.read=stream, which fetches whole shards ahead"
    elif facts.remote and not facts.cache_gb:
        text = "data.cache_gb=… of at least the size of the shards, for all epochs after the first"
    else:
        text = "shards on a faster disk, such as a local one"
    return [Change(text, facts.rate * (us["whole"] + us["wait"]) / us["whole"])]


def verdict(facts: Facts, phases: Mapping[str, float]) -> str:
    """Returns whether the loader bounds the run, and otherwise what does. `phases`: seconds by phase of training."""
    if facts.bound:
        said = (
            f"the run waits for its loader {facts.wait:.0%} of the time: it trains {facts.trained:,.0f} samples per "
            f"second and device, and without waiting would train {facts.needed:,.0f}"
        )
        if facts.rate > _MARGIN * facts.needed:
            said += (
                f"; by itself the loader reaches {facts.rate:,.0f} here, so it lacks cores during training, or the run "
                "was on a slower machine"
            )
        if facts.size and facts.us["image"] > 0.5 * facts.us["whole"]:
            said += (
                f"; images take {facts.us['image'] / facts.us['whole']:.0%} of the CPU time: shards of smaller ones, "
                f"python -m clipx.prepare source=… out=… resize=keep_ratio size={facts.size}, need less"
            )
        return said
    others = {name: seconds for name, seconds in phases.items() if name != "data_wait" and seconds > 0}
    largest = max(others, key=lambda name: others[name], default="step")
    share = others.get(largest, 0.0) / max(sum(phases.values()), 1e-9)
    fixes = {
        "step": "python -m clipx.bench step measures its parts",
        "checkpoint": "save less often with checkpoint.every",
        "evaluation": "evaluate less often with evaluator.NAME.every",
    }
    return (
        f"the run does not wait for its loader ({facts.wait:.0%} of the time); the largest phase is train/{largest}_s "
        f"with {share:.0%}: {fixes.get(largest, 'see train/ in metrics.jsonl')}"
    )


# ------------------------------------------------------------------------------------------------------- measurement


def measure_run(spec: LoaderSpec, location: str, log: Callable[[str], None]) -> Findings:
    """Measures the loader of the run at `location`, and finds what makes it faster. Raises ClipxError."""
    saved = open_run(location, "of", files=("metrics.jsonl",))
    run, run_dir = saved.spec, str(saved.folder)
    every = read_rows(RunDir(saved.folder).metrics)
    rows = [row for row in every if "train/data_wait_share" in row]
    require(bool(rows), f"of={location} has logged no step: train it first")
    processes = Processes("cpu", spec.threads)
    log(f"the loader of {location}: {run.data.loader_processes()} workers, without training")
    rate = processes.run(rate_of_run, run_dir, spec.batches)
    log("parts of loading a sample")
    us = processes.run(microseconds_of_run, run_dir, min(512, run.data.batch_size))
    facts = _facts(run, rows, rate, us)
    names = ("data_wait", "step", "checkpoint", "evaluation")
    log(verdict(facts, {name: sum(row.get(f"train/{name}_s", 0.0) for row in every) for name in names}))
    found = changes(facts) if facts.bound else []
    figures = {
        "of": location,
        "loader_bound": facts.bound,
        "data_wait_share": round(facts.wait, 4),
        "loader_samples_per_second": round(rate, 1),
        "training_samples_per_second_per_device": round(facts.trained, 1),
        "microseconds": us,
        "changes": [{"change": one.text, "samples_per_second": round(one.rate, 1)} for one in found],
    }
    rates = {
        "samples loaded by the workers of one rank, without training": rate,
        "samples trained per device": facts.trained,
        "samples trained per device, if it did not wait": facts.needed,
    }
    tables = [Table(location, ("", "per second"), [(text, f"{number:,.0f}") for text, number in rates.items()])]
    parts = Table("microseconds per sample, one process", ("", "µs"))
    parts.rows += [(text, f"{us[name]:,.0f}") for name, text in PARTS.items()]
    tables.append(parts)
    if facts.bound:
        tables.append(Table("changes, the fastest first", ("", "expected per second", "of what training needs")))
        tables[-1].rows += [(one.text, f"{one.rate:,.0f}", f"{one.rate / facts.needed:.0%}") for one in found]
    return Findings(figures, {"benchmark": spec.kind, **figures, "results": spec.run_dir}, tables)


def _facts(run: RunSpec, rows: Sequence[Row], rate: float, us: dict[str, float]) -> Facts:
    dataset, image = open_data(run.data), run.model.image
    source = dataset.train
    while hasattr(source, "source"):  # of a split or a filter
        source = source.source
    return Facts(
        rate=rate,
        trained=statistics.median(row["train/samples_per_second_per_device"] for row in rows),
        wait=statistics.median(row["train/data_wait_share"] for row in rows),
        workers=run.data.loader_processes(),
        cores=cores(),
        us=us,
        size=math.ceil(image.size * 8 / 7) if image.kind.squares else 0,  # 256 for crops of 224
        remote=getattr(source, "remote", False),
        whole_shards=dataset.whole_shards,
        cache_gb=getattr(run.data, "cache_gb", 0.0),
    )


def microseconds_of_run(comm: Comm, run_dir: str, samples: int) -> dict[str, float]:
    """Returns the microseconds of each of PARTS, means over samples of the run, in one thread."""
    torch.set_num_threads(1)
    _, _, stream = stream_of_run(Path(run_dir))
    count = min(samples, stream.order.samples)
    stream[range(count)]  # indexes the shards, and loads the libraries
    begin, cpu, idle = time.perf_counter(), time.process_time(), _not_running()
    batch = stream[range(count, 2 * count)]
    whole = time.process_time() - cpu
    wall = time.perf_counter() - begin - (_not_running() - idle)
    if not isinstance(batch, Batch):
        raise batch
    found, encoded = {"whole": whole, "wait": max(0.0, wall - whole)}, list[bytes]()
    for position in range(count, 2 * count):
        with suppress(BadSample):
            encoded.append(stream.source.read(stream.order(position)).image)
    rows = stream.images.allocate(1)
    begin = time.process_time()
    for image in encoded:
        with suppress(BadSample):
            stream.images.read(image, Draw(random.Random(0), ""), rows, 0)
    found["image"] = time.process_time() - begin
    return {name: round(found[name] / count * 1e6, 1) for name in PARTS}


def _not_running() -> float:
    """Returns the seconds that this thread was ready and other processes had the cores; 0 if they are not known."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
