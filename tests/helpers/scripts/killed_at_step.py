"""Trains, and kills a rank by SIGKILL before a step: STEP RANK OVERRIDES..."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from helpers.runs import compose

from clipx.trainer.trainer import Trainer

if TYPE_CHECKING:
    from clipx.data.batch import Batch
    from clipx.objective.base import Metrics

trainer = Trainer(compose(*sys.argv[3:]))
run = trainer.step


def step(batch: Batch) -> Metrics:
    if trainer.steps_done == int(sys.argv[1]) and trainer.comm.rank == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return run(batch)


trainer.step = step  # type: ignore[method-assign]
trainer.fit()
