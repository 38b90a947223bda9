"""The retention policy of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clipx.checkpoint.records import read_state


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Facts about a checkpoint that the retention policy uses."""

    step: int
    keep: bool = False  # never deleted
    score: float | None = None  # higher is better
    uploaded: bool | None = None  # None: uploads are disabled

    @classmethod
    def read(cls, step: int, content: bytes) -> CheckpointInfo:
        """Parses a state.json. Raises DamagedCheckpoint."""
        file, _ = read_state(content)
        return cls(step, file.keep, file.score)


def steps_to_keep(saved: Sequence[CheckpointInfo], keep_last: int, only_newest: bool = False) -> set[int]:
    """Returns the steps of the checkpoints to keep.

    These are the `keep_last` newest, those with `keep`, the one with the highest score, and those not uploaded yet.
    With `only_newest`: the newest and those not uploaded.
    """
    newest = sorted(saved, key=lambda info: info.step, reverse=True)
    steps = {info.step for info in newest[: 1 if only_newest else keep_last]}
    steps |= {info.step for info in saved if info.uploaded is False or (only_newest and not info.uploaded)}
    if not only_newest:
        steps |= {info.step for info in saved if info.keep}
        scored = [(info.score, info.step) for info in saved if info.score is not None and math.isfinite(info.score)]
        steps |= {max(scored)[1]} if scored else set()
    return steps
