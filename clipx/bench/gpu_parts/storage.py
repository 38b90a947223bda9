"""Checkpoints from the device, and JPEGs to pixels by the device's decoder and by loader processes."""

from __future__ import annotations

import time
from dataclasses import asdict

import torch

from clipx.bench import pipelines, saving, shards
from clipx.bench.gpu_parts.report import Report, Sizes
from clipx.distributed.comm import Comm


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
    """Measures nvJPEG, and clipx's loader processes, on photographs of 256 and 512 pixels."""
    pipelines.fork_workers()
    workers, batch, count = sizes.pick((14, 256, 60), (1, 4, 2))
    for side in sizes.pick((256, 512), (32,)):
        try:
            report.number(f"nvjpeg {side}", _decoded(sizes, side), "images/s")
        except (RuntimeError, ImportError) as error:
            report.failed(f"nvjpeg {side}", error)
        folder = sizes.folder / str(side)
        folder.mkdir(parents=True)
        shards.write(folder, sizes.pick(4096, 32), side, sizes.seed)
        comm = Comm(0, 1, 0, sizes.place)
        rate = pipelines.clipx_processes(comm, str(folder), batch, workers, count, sizes.seed)
        report.number(f"loader {side}, {workers} processes", rate, "images/s")


def _decoded(sizes: Sizes, side: int) -> float:
    """Returns the images per second of torchvision's decoder on the device."""
    from torchvision.io import ImageReadMode, decode_jpeg  # type: ignore[import-untyped]

    count: int
    rounds: int
    count, rounds = sizes.pick((256, 10), (4, 1))
    encoded = [pipelines.photograph((side, side * 3 // 4), i) for i in range(min(64, count))]
    files = [torch.frombuffer(bytearray(encoded[i % len(encoded)]), dtype=torch.uint8) for i in range(count)]

    def decode() -> None:
        decode_jpeg(files, mode=ImageReadMode.RGB, device=sizes.device)
        if sizes.device == "cuda":
            torch.cuda.synchronize()

    decode()
    start = time.perf_counter()
    for _ in range(rounds):
        decode()
    return float(rounds * count / (time.perf_counter() - start))
