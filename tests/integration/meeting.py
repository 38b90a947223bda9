"""One process of a job on the CPU: meets the others, and prints a line of JSON about it.

    meeting.py ['{"threads": 2}' [TIMES]]

TORCH, where it is set, is the version of torch that this process has; COLOUR a fact that is to be the same on all;
BOUND binds it to one core of its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

import torch

from clipx import place, rendezvous
from clipx.distributed import DistributedSpec
from clipx.errors import ClipxError


def main(options: str = "{}", times: str = "1") -> dict[str, Any]:
    spec = DistributedSpec(device="cpu", **json.loads(options))
    for _ in range(int(times)):
        comm = spec.build()
        found = {
            "rank": comm.rank,
            "world": comm.world,
            "local_rank": comm.local_rank,
            "hosts": comm.gather_objects(place.node_name()),
            "sum": int(comm.sum(torch.tensor(comm.rank)).item()),
            "threads": torch.get_num_threads(),
        }
        comm.agree(config={"seed": 0, "colour": os.environ.get("COLOUR", "red")}, data="the same")
        comm.barrier()
        comm.close()
    return found


def say(found: dict[str, Any]) -> None:
    os.write(1, f"{json.dumps(found)}\n".encode())  # at once: torchrun and srun mix what their processes print


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    rendezvous._CONNECT_S = 0.5
    torch.__version__ = os.environ.get("TORCH", torch.__version__)
    if "BOUND" in os.environ:
        cores = place.usable_cores()
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    try:
        say(main(*sys.argv[1:]))
    except ClipxError as error:
        say({"rank": place.told_rank(), "error": str(error)})
        sys.stderr.flush()
        os._exit(error.exit_code)
