"""Which checkpoints are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What the policy knows of a checkpoint."""

    step: int
    keep: bool = False  # for ever
    score: float | None = None  # the higher, the better
    uploaded: bool | None = None  # None: nothing is uploaded anywhere

    @classmethod
    def read(cls, step: int, content: bytes) -> CheckpointInfo:
        """From a state.json. Raises ValueError, KeyError or TypeError where it is none."""
        state = json.loads(content)
        return cls(step, bool(state["keep"]), state["score"])


def steps_to_keep(saved: Sequence[CheckpointInfo], keep_last: int, only_newest: bool = False) -> set[int]:
    """The steps that stay: the `keep_last` newest, those that are kept for ever, the one with the highest score, and
    whatever is not uploaded yet. With `only_newest`, the newest and whatever is not uploaded.
    """
    newest = sorted(saved, key=lambda one: one.step, reverse=True)
    stay = {one.step for one in newest[: 1 if only_newest else keep_last]}
    stay |= {one.step for one in saved if one.uploaded is False or (only_newest and not one.uploaded)}
    if not only_newest:
        stay |= {one.step for one in saved if one.keep}
        scored = [(one.score, one.step) for one in saved if one.score is not None and math.isfinite(one.score)]
        stay |= {max(scored)[1]} if scored else set()
    return stay
