"""Checkpoints from the device, and JPEGs to pixels by the device's decoder and by loader processes."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import torch

from clipx.bench import pipelines, saving, shards
from clipx.bench.gpu_parts.report import Report, Sizes, milliseconds
from clipx.bench.measure import synchronize
from clipx.data.batch import Batch
from clipx.distributed.comm import Comm
from clipx.errors import DataError
from clipx.extra.gpu_decode.decoder import decode_jpegs


def save(sizes: Sizes, report: Report) -> None:
    """Measures how long training pauses for a checkpoint of 1.8 GB, and until it is on disk."""
    comm = Comm(0, 1, 0, sizes.place)
    timings = saving.race(comm, str(sizes.folder / "race"), sizes.pick(150_000_000, 10_000), 2, sizes.seed)
    for name, found in timings.items():
        report.number(f"checkpoint {name} pause, first", found[0].stall, "s")
        for key, value in asdict(found[-1]).items():
            unit = "" if key == "slowdown" else "s"
            report.number(f"checkpoint {name} {'pause' if key == 'stall' else key}", value, unit)


def images(sizes: Sizes, report: Report) -> None:
    """Measures nvJPEG, clipx's loader processes and data.decode=gpu on photographs of 256 and 512 pixels."""
    pipelines.fork_workers()
    workers, batch, count = sizes.pick((14, 256, 60), (1, 4, 2))
    for side in sizes.pick((256, 512), (32,)):
        folder = sizes.folder / str(side)
        folder.mkdir(parents=True)
        shards.write(folder, sizes.pick(4096, 32), side, sizes.seed)
        comm = Comm(0, 1, 0, sizes.place)
        rate = pipelines.clipx_processes(comm, str(folder), batch, workers, count, sizes.seed)
        report.number(f"loader {side}, {workers} processes", rate, "images/s")
        try:
            report.number(f"nvjpeg {side}", _decoded(sizes, side), "images/s")
            _decoded_batches(sizes, report, side, folder)
        except (RuntimeError, ImportError, DataError) as error:
            report.failed(f"nvjpeg {side}", error)


def _decoded(sizes: Sizes, side: int) -> float:
    """Returns the images per second of the device's decoder alone."""
    count: int
    rounds: int
    count, rounds = sizes.pick((256, 10), (4, 1))
    encoded = [shards.photograph((side, side * 3 // 4), i) for i in range(min(64, count))]
    files = [torch.frombuffer(bytearray(encoded[i % len(encoded)]), dtype=torch.uint8) for i in range(count)]
    return 1e3 * count / milliseconds(lambda: decode_jpegs(files, sizes.place), sizes.place, rounds)


def _decoded_batches(sizes: Sizes, report: Report, side: int, folder: Path) -> None:
    """Measures data.decode=gpu: one batch to pixels on the device, and batches of few loader processes."""
    batch, workers, rounds = sizes.pick((1024, 4, 12), (4, 1, 1))
    encoded = pipelines.training_stream(str(folder), sizes.seed, on_device=True)[range(batch)]
    assert isinstance(encoded, Batch)
    rate = 1e3 * batch / milliseconds(lambda: encoded.to(sizes.place), sizes.place, rounds)
    report.number(f"decode=gpu {side}", rate, "images/s")
    batches = pipelines.decoded_batches(str(folder), batch, workers, sizes.seed, sizes.place)
    for _ in range(2 * workers):  # those that are ready
        next(batches)
    begin = time.perf_counter()
    for _ in range(rounds):
        next(batches)
    synchronize(sizes.place)
    rate = batch * rounds / (time.perf_counter() - begin)
    report.number(f"decode=gpu {side}, {workers} processes", rate, "images/s")
