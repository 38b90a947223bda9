"""Contents of a checkpoint's state.json and MANIFEST.json, and the retention policy, which reads them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from clipx.errors import CheckpointError
from clipx.storage.safe_json import parse_json, read_as, shown

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "MANIFEST.json"

Count = Annotated[int, Field(ge=0, lt=2**63)]


class DamagedCheckpoint(CheckpointError):
    """A checkpoint has missing or changed files, or contents that clipx does not write. An older one can replace it."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """Content of state.json."""

    keep: bool  # never deleted by the retention policy
    score: float | None  # higher is better; NaN in files of earlier versions
    state: dict[str, Any]  # values of the run: each reader knows which ones it needs
    step: Count | None = None  # None in files of earlier versions


def read_state(content: bytes) -> StateFile:
    """Parses a state.json. Raises DamagedCheckpoint."""
    try:
        return replace(read_as(StateFile, content), state=parse_json(content)["state"])
    except ValueError as error:
        raise DamagedCheckpoint(f"{STATE} is not the state of a checkpoint ({error})") from None


def read_manifest(content: bytes) -> dict[str, str]:
    """Parses a manifest. Returns the SHA-256 of each file by name. Raises DamagedCheckpoint."""
    try:
        manifest = read_as(dict[str, str], content)
    except ValueError as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read: {error}") from None
    # A path could point outside the folder.
    if foreign := [name for name in manifest if not re.fullmatch(r"\w[\w.-]*", name)]:
        raise DamagedCheckpoint(f"{MANIFEST} names {shown(foreign[0])}, which is not a file of the checkpoint")
    return manifest


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
        file = read_state(content)
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
