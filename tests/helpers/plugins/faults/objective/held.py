"""The default objective, held before its sixth step, so that tests interrupt a run at a step that they know."""

import select
import signal
import socket
import time
from pathlib import Path

from clipx.config.duration import Length
from clipx.config.registry import frozen, register
from clipx.distributed.comm import Comm
from clipx.objective.base import Objective
from clipx.objective.infonce import InfoNCESpec

STEPS = 5  # steps that a process makes before it is held
LIMIT_S = 600.0


@register("objective")
@frozen
class HeldSpec(InfoNCESpec):
    kind: str = "held"
    until: str  # the run is held until this file exists, or until a signal

    def build(self, comm: Comm, length: Length) -> Objective:
        objective = InfoNCESpec.build(self, comm, length)
        objective.register_forward_pre_hook(Hold(Path(self.until)))
        return objective


class Hold:
    def __init__(self, until: Path) -> None:
        self.until, self.steps = until, 0
        self.received: socket.socket | None = None

    def __call__(self, *_: object) -> None:
        if self.received is None:
            self.received, sender = socket.socketpair()
            sender.setblocking(False)
            signal.set_wakeup_fd(sender.detach())  # a signal writes a byte, which makes `received` readable
        self.steps += 1
        end = time.monotonic() + LIMIT_S
        while self.steps > STEPS and time.monotonic() < end and not self.until.exists():
            if select.select([self.received], [], [], 0.02)[0]:
                return
