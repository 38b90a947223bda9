"""`clipx.train` that records the samples of each step; the soak test starts and kills it.

The only other difference to `python -m clipx.train` are shorter waits for a storage that does not answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import clipx.checkpoint.downloader
import clipx.storage.remote
from clipx.data.batch import Batch
from clipx.objective.base import Metrics
from clipx.train import main
from clipx.trainer.trainer import Trainer

Step = Callable[[Trainer, Batch], Metrics]


def noting(step: Step, folder: Path, attempt: int) -> Step:
    """Writes a line for each step, in a file for each attempt, rank and process."""

    def noted(trainer: Trainer, batch: Batch) -> Metrics:
        metrics = step(trainer, batch)
        rank, world = trainer.comm.rank, trainer.comm.world
        line = {"step": trainer.steps_done, "world": world, "samples": batch.index.tolist()}
        with (folder / f"{attempt:05d}.{rank}.{os.getpid()}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return metrics

    return noted


if __name__ == "__main__":
    clipx.storage.remote._READ_S = 2
    clipx.checkpoint.downloader.RETRY_S = 8.0
    noted = noting(Trainer.step, Path(os.environ["CLIPX_SOAK_NOTES"]), int(os.environ["CLIPX_SOAK_ATTEMPT"]))
    Trainer.step = noted  # type: ignore[method-assign]
    main()
