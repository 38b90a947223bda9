"""Trains a run, in which one rank is lost at a place.

    lose_rank.py PLACE FAULT VICTIM MODULE WORDS…

The places are those of `PLACES`. FAULT is `kill`, `stop` (SIGSTOP), `_exit`, `exit` (sys.exit) or `raise`. MODULE is the
command, such as clipx.train. The limits of the heartbeats are shorter than those of a run.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from clipx.distributed import heartbeat
from clipx.errors import DataError

# Module, class and function before whose call the rank is lost; after it, if the name ends in `!`.
PLACES = {
    "start": "",
    "rendezvous": "clipx.distributed.rendezvous._check_in!",
    "connect": "torch.distributed.init_process_group",
    "data": "clipx.trainer.data_side.open_on_all_ranks",
    "model": "clipx.trainer.trainer.Learner",
    "directory": "clipx.checkpoint.manager.CheckpointManager.fetch",
    "writer": "clipx.checkpoint.manager.CheckpointManager.open",
    "loggers": "clipx.trainer.run.Run.start",
    "first step": "clipx.trainer.trainer.Trainer.step",
    "logged": "clipx.trainer.trainer.Trainer._row",
    "evaluation": "clipx.trainer.evaluation.PeriodicEvaluation.run",
    "staged": "clipx.checkpoint.async_writer.AsyncWriter._stage!",
    "written": "clipx.checkpoint.async_writer.AsyncWriter._write_files",
    "committed": "clipx.checkpoint.async_writer.AsyncWriter._attempt!",
    "uploading": "clipx.trainer.trainer.Trainer._save!",
    "signalled": "clipx.trainer.trainer.Learner",
    "twice": "clipx.trainer.trainer.Trainer.step",
    "failing": "clipx.checkpoint.async_writer.AsyncWriter._write_files",
    "end": "clipx.data.bad_samples.BadSampleCounter.sum",
    "barrier": "clipx.trainer.trainer.Trainer._check_loss",
    "close": "clipx.trainer.run.Run.close",
    "evaluate": "clipx.evaluate.candidates.evaluate_runs",
}
LIMITS = {"PERIOD": 0.2, "LOST_AFTER": 4, "GRACE": 4, "SILENT": 8, "SILENT_AT_START": 8, "LOOK": 1}


def lose(fault: str) -> None:
    os.write(1, b"lost\n")  # for the test: the rank came to the place
    if fault == "raise":
        raise DataError("the shard is gone: bring it back")
    if fault == "exit":
        sys.exit(0)
    if fault == "_exit":
        os._exit(3)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


def wrap(place: str, call: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
    """Replaces the function `place` by one that calls `call(function, arguments, options)`."""
    owner, name = place.removesuffix("!").rsplit(".", 1)
    try:
        found: Any = import_module(owner)
    except ModuleNotFoundError:
        found = getattr(import_module(owner.rpartition(".")[0]), owner.rpartition(".")[2])
    function = getattr(found, name)
    setattr(found, name, lambda *args, **options: call(function, args, options))


def prepare_other(place: str, rank: int) -> None:
    """Adds the second fault of some places to a rank that is not lost."""
    search = "clipx.distributed.heartbeat.Heartbeats._find_cause"
    if place == "uploading" and rank == 0:  # an upload that does not end
        wrap("clipx.checkpoint.uploader.Uploader._upload", lambda *_: threading.Event().wait())
    if place == "signalled":  # torchrun sends SIGTERM when a rank has ended
        wrap(search, lambda found, args, _: (os.kill(os.getpid(), signal.SIGTERM), found(*args))[1])
    if place == "twice" and rank == 2:  # lost while it looks for the lost rank
        wrap(search, lambda *_: lose("kill"))
    if place == "failing" and rank == 0:  # an error of this rank, while its writer waits for the lost rank
        wrap("clipx.trainer.trainer.Trainer._between_steps", lambda found, args, _: (found(*args), lose("raise")))


def main() -> None:
    place, fault, victim = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rank = int(os.environ["RANK"])
    for name, seconds in LIMITS.items():
        setattr(heartbeat, f"_{name}_S", seconds)
    if rank != victim:
        prepare_other(place, rank)
    if rank == victim:
        if not PLACES[place]:
            lose(fault)
        after = PLACES[place].endswith("!")

        def lost(function: Callable[..., Any], args: Any, options: Any) -> Any:
            if not after:
                lose(fault)
            result = function(*args, **options)
            if after:
                lose(fault)
            return result

        wrap(PLACES[place], lost)
    sys.argv[1:] = sys.argv[4:]
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
