"""Runs measurements in new processes, so that earlier ones leave nothing in their memory or caches."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from clipx.bench.spec import BenchError
from clipx.config.lazy_torch import dist, torch
from clipx.distributed.comm import Comm
from clipx.distributed.launch_env import cores
from clipx.processes import first_death, processes_of, start_in_child

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Rank, device and threads of a measuring process. Plain values, for it is pickled to the process."""

    rank: int
    ranks: int
    device: str  # cpu, cuda
    threads: int
    folder: str

    @property
    def first_failure(self) -> Path:
        """The file with the number of the rank that failed first: the errors of the others are its consequences."""
        return Path(self.folder) / "first_failure"

    def join(self) -> Comm:
        """Sets the threads and the device of the process, and initialises its process group. Collective."""
        torch.set_num_threads(self.threads)
        # torch warns at every call that the gather functions of open_clip and clipx are deprecated.
        warnings.filterwarnings("ignore", r"`?torch\.distributed\.", FutureWarning)
        device = torch.device("cpu") if self.device == "cpu" else torch.device("cuda", self.rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.ranks > 1:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=(Path(self.folder) / "rendezvous").as_uri(),
                rank=self.rank,
                world_size=self.ranks,
                timeout=_TIMEOUT,
                device_id=device if device.type == "cuda" else None,
            )
        return Comm(self.rank, self.ranks, self.rank, device)


def _run(config: RankConfig, call: Callable[..., T], args: tuple[object, ...]) -> T:
    comm = config.join()
    try:
        return call(comm, *args)
    except BaseException:
        # Before the group is closed, for that makes the other ranks fail, maybe sooner than this error is reported.
        with suppress(FileExistsError), config.first_failure.open("x") as file:
            file.write(str(config.rank))
        raise
    finally:
        comm.close()


@dataclass(frozen=True, slots=True)
class Processes:
    """Starts processes on a device, which share `threads` (0: the number of available cores)."""

    device: str  # cpu, cuda
    threads: int = 0

    def run(self, call: Callable[..., T], *args: object, ranks: int = 1) -> list[T]:
        """Calls `call(comm, *args)` on each of `ranks` new processes. Returns the results in rank order.

        Raises BenchError if a process ends without a result.
        """
        threads = max(1, (self.threads or cores()) // ranks)
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(
                ranks, mp_context=get_context("spawn"), initializer=start_in_child, max_tasks_per_child=1
            ) as pool,
        ):
            configs = [RankConfig(rank, ranks, self.device, threads, folder) for rank in range(ranks)]
            own = processes_of(pool)
            waiting = [pool.submit(_run, config, call, args) for config in configs]
            errors = [future.exception() for future in waiting]
            killed = next((error for error in errors if isinstance(error, BrokenProcessPool)), None)
            if killed is not None:
                pool.shutdown()
                raise BenchError(f"a measuring process {first_death(own, 'give smaller sizes')}") from killed
            if configs[0].first_failure.exists():
                waiting[int(configs[0].first_failure.read_text())].result()  # raises its error
            return [future.result() for future in waiting]
