"""Contents of a checkpoint's state.json and MANIFEST.json, and their checks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from clipx.errors import CheckpointError
from clipx.storage.safe_json import parse_json, read_as, shown

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "MANIFEST.json"

Count = Annotated[int, Field(ge=0, lt=2**63)]
_Steps = Annotated[int, Field(gt=0, lt=2**63)]
_Empty = Annotated[dict[str, Any], Field(max_length=0)]


class DamagedCheckpoint(CheckpointError):
    """A checkpoint has missing or changed files, or contents that clipx does not write. An older one can replace it."""


@dataclass(frozen=True, slots=True)
class LossScaleState:
    """State of the loss scale of float16."""

    scale: Annotated[FiniteFloat, Field(gt=0)]
    steps: Count  # without an overflow
    skipped: Count


@dataclass(frozen=True, slots=True)
class EarlyStoppingState:
    """State of early stopping."""

    metric: str | None
    mode: str
    best: FiniteFloat | None
    waited: Count  # evaluations since the best one


@dataclass(frozen=True, slots=True)
class RunState:
    """Types of the values of a run's state. A value may be missing: each reader knows which ones it needs."""

    samples_seen: Count = 0
    epoch_samples: Count = 0
    world: Count = 0
    precision: str = ""  # number format, as the device chose it
    data: str = ""  # fingerprint
    streams: Count = 0  # in which whole shards are read
    teacher: str = ""  # digest
    overdue: list[str] = field(default_factory=list)  # names of evaluators
    non_finite: tuple[Count, Count] = (0, 0)  # skipped steps: in total, in a row
    interval: dict[str, tuple[float, _Steps]] = field(default_factory=dict)  # metric: sum and steps since the last log
    loss_scale: LossScaleState | _Empty = field(default_factory=dict)
    early_stopping: EarlyStoppingState | _Empty = field(default_factory=dict)
    best: FiniteFloat | None = None  # highest score so far
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateFile:
    """Content of state.json."""

    keep: bool  # never deleted by the retention policy
    score: float | None  # higher is better; NaN in files of earlier versions
    state: RunState
    step: Count | None = None  # None in files of earlier versions


def read_state(content: bytes) -> tuple[StateFile, dict[str, Any]]:
    """Parses a state.json. Returns it, and all values of the run's state. Raises DamagedCheckpoint."""
    try:
        return read_as(StateFile, content), parse_json(content)["state"]
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
