"""Measuring process of the checkpoint benchmark: all implementations save the same state in turns."""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import async_save

from clipx.bench.measure import synchronize
from clipx.checkpoint.async_writer import AsyncWriter
from clipx.checkpoint.spec import CheckpointSpec
from clipx.distributed.comm import Comm
from clipx.storage.local import sync

_BLOCK = (768, 3072)  # weight of an MLP of ViT-B
_WORK = 512  # side of the matrices that the training thread multiplies meanwhile
_ALONE = 40  # steps without a save, before and after each one

Wait = Callable[[], object]


@dataclass(frozen=True, slots=True)
class SaveTiming:
    """Timing of one save."""

    stall: float  # seconds until training may continue
    total: float  # seconds until the checkpoint is on disk
    slowdown: float  # mean time of a step of work until then, relative to that without a save; 1 if no work is left


def race(comm: Comm, folder: str, parameters: int, repeats: int, seed: int) -> dict[str, list[SaveTiming]]:
    """Measures each implementation in turns. The first save of each also allocates memory that later ones reuse."""
    # DCP warns about a single process.
    warnings.filterwarnings("ignore", r"torch\.distributed is disabled", UserWarning)
    tensors = state(parameters, comm.device, seed)
    root = Path(folder)
    root.mkdir(parents=True)
    saver = AsyncWriter(root / "clipx", CheckpointSpec(keep_last=1), comm, lambda kind, **facts: None)
    saver.reserve(tensors)  # as a run does after its first step; finished before the first save of clipx
    pinned = comm.device.type == "cuda"
    targets = [torch.zeros(x.shape, pin_memory=pinned) for x in tensors.values()]
    contestants: dict[str, Callable[[Path], Wait]] = {
        "copy": lambda path: _copy(list(tensors.values()), targets),
        "torch_save": lambda path: _torch_save(tensors, path),
        "dcp_async": lambda path: _dcp_async(tensors, path),
        "clipx": lambda path: _clipx(saver, tensors),
    }
    work = _work(comm, seed)
    timings: dict[str, list[SaveTiming]] = {name: [] for name in contestants}
    try:
        for i in range(1 + repeats):
            names = list(contestants)
            for name in names[i % len(names) :] + names[: i % len(names)]:
                path = root / name
                timings[name].append(_timed_save(lambda name=name, path=path: contestants[name](path), work))  # type: ignore[misc]
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                os.sync()  # otherwise pending writes would delay the next save
    finally:
        saver.close()
        shutil.rmtree(root)
    return timings


def state(parameters: int, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Returns weights and AdamW's two moments of them, in the sizes of a transformer's blocks."""
    torch.manual_seed(seed)
    block = _BLOCK[0] * _BLOCK[1]
    sizes = [block] * (parameters // block) + ([parameters % block] if parameters % block else [])
    tensors = {}
    for i, size in enumerate(sizes):
        shape = _BLOCK if size == block else (size,)
        for name in (f"model/{i}", f"optimizer/{i}/exp_avg", f"optimizer/{i}/exp_avg_sq"):
            tensors[name] = torch.randn(shape, device=device)
        tensors[f"optimizer/{i}/step"] = torch.tensor(float(i))
    return tensors


def _timed_save(save: Callable[[], Wait], work: Callable[[], float]) -> SaveTiming:
    alone = [work() for _ in range(_ALONE)]
    start = time.perf_counter()
    wait = save()
    stall = time.perf_counter() - start
    steps = []
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(wait)
        while not done.done():
            steps.append(work())
    done.result()
    total = time.perf_counter() - start
    if len(steps) <= 2:
        return SaveTiming(stall, total, 1.0)
    alone += [work() for _ in range(_ALONE)]  # before and after: the speed of a machine drifts
    return SaveTiming(stall, total, statistics.mean(steps) / statistics.mean(alone))


def _work(comm: Comm, seed: int) -> Callable[[], float]:
    """Returns a function that does a step of work on the training thread and returns its seconds."""
    x = torch.randn(_WORK, _WORK, generator=torch.Generator().manual_seed(seed)).to(comm.device)

    def step() -> float:
        start = time.perf_counter()
        for _ in range(5):
            x @ x
        synchronize(comm.device)
        return time.perf_counter() - start

    return step


# --------------------------------------------------------------------------------------------- implementations


def _copy(sources: list[Tensor], targets: list[Tensor]) -> Wait:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
    synchronize(sources[0].device)
    return lambda: None


def _clipx(saver: AsyncWriter, tensors: dict[str, Tensor]) -> Wait:
    saver.save(1, tensors, {}, until_update=tensors)
    return saver.wait


def _torch_save(tensors: dict[str, Tensor], path: Path) -> Wait:
    torch.save(tensors, path)
    return lambda: sync(path)


def _dcp_async(tensors: dict[str, Tensor], path: Path) -> Wait:
    future = async_save(tensors, checkpoint_id=path)
    assert isinstance(future, Future)
    return future.result
