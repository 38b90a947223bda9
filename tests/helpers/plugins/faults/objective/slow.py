"""The default objective with a pause before each step, in which tests can interrupt a run."""

import time
from dataclasses import dataclass

from clipx.config.duration import Length
from clipx.config.registry import option
from clipx.distributed.comm import Comm
from clipx.objective.base import Objective
from clipx.objective.infonce import InfoNCESpec


@option("objective")
@dataclass(kw_only=True, slots=True)
class SlowSpec(InfoNCESpec):
    kind: str = "slow"
    step_s: float = 0.2  # sleep before each step, in seconds

    def build(self, comm: Comm, length: Length) -> Objective:
        objective = InfoNCESpec.build(self, comm, length)
        objective.register_forward_pre_hook(lambda *_: time.sleep(self.step_s))
        return objective
