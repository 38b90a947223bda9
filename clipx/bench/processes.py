"""Runs measurements in new processes, so that earlier ones leave nothing in their memory or caches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeVar

from clipx.bench.spec import BenchError
from clipx.config.lazy_torch import torch
from clipx.distributed.comm import Comm
from clipx.distributed.launch_env import cores
from clipx.processes import first_death, processes_of, start_in_child

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Processes:
    """Starts processes on a device, with a number of threads (0: the number of available cores)."""

    device: str  # cpu, cuda
    threads: int = 0

    def run(self, call: Callable[..., T], *args: object) -> T:
        """Returns `call(comm, *args)` of a new process. Raises BenchError if it ends without a result."""
        context = get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, initializer=start_in_child, max_tasks_per_child=1) as pool:
            own = processes_of(pool)
            waiting = pool.submit(self._call, call, args)
            try:
                return waiting.result()
            except BrokenProcessPool as error:
                pool.shutdown()
                raise BenchError(f"a measuring process {first_death(own, 'give smaller sizes')}") from error

    def _call(self, call: Callable[..., T], args: tuple[object, ...]) -> T:
        """Calls a function in this process, after setting its threads and its device."""
        torch.set_num_threads(self.threads or cores())
        # torch warns at every call that the gather functions of open_clip and clipx are deprecated.
        warnings.filterwarnings("ignore", r"`?torch\.distributed\.", FutureWarning)
        device = torch.device("cpu") if self.device == "cpu" else torch.device("cuda", 0)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return call(Comm(0, 1, 0, device), *args)
