"""One process of a job on the CPU: joins the rendezvous and prints a line of JSON about it.

    rendezvous.py ['{"threads": 2}' [TIMES]]

Environment variables: TORCH is the reported version of torch; COLOUR is a value that must be equal on all ranks; LATE
suspends the process for a second before its last read from the store, and before it closes.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from clipx.distributed import launch_env, rendezvous
from clipx.distributed.spec import DistributedSpec
from clipx.errors import ClipxError


def run(*arguments: str) -> None:
    logging.basicConfig(format="%(message)s")
    torch.__version__ = os.environ.get("TORCH", torch.__version__)
    if "LATE" in os.environ:
        rendezvous._cores_key = late_read(rendezvous._cores_key)
    try:
        print_json(main(*arguments))
    except ClipxError as error:
        print_json({"rank": launch_env.rank_or_none(), "error": str(error)})
        sys.stderr.flush()
        os._exit(error.exit_code)


def late_read(cores_key: Callable[[], str]) -> Callable[[], str]:
    """Returns the function with a pause before its second call in a rendezvous, which is the last read of a rank."""
    calls = itertools.count(1)

    def late() -> str:
        if next(calls) % 2 == 0:
            time.sleep(1)
        return cores_key()

    return late


def main(options: str = "{}", times: str = "1") -> dict[str, Any]:
    spec = DistributedSpec(device="cpu", **json.loads(options))
    for _ in range(int(times)):
        comm = spec.build()
        found = {
            "rank": comm.rank,
            "world": comm.world,
            "local_rank": comm.local_rank,
            "hosts": comm.gather_objects(launch_env.node_name()),
            "sum": int(comm.sum(torch.tensor(comm.rank)).item()),
            "threads": torch.get_num_threads(),
            "sharing": comm.sharing,
        }
        comm.require_equal(config={"seed": 0, "colour": os.environ.get("COLOUR", "red")}, data="the same")
        comm.barrier()
        if "LATE" in os.environ:
            time.sleep(1)
        comm.close()
    return found


def print_json(found: dict[str, Any]) -> None:
    # one write: torchrun and srun interleave the output of their processes
    os.write(1, f"{json.dumps(found)}\n".encode())


if __name__ == "__main__":
    run(*sys.argv[1:])
