"""Objectives: what scores the local batch of embeddings against the global one. One file and one YAML each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipx.config import MISSING

if TYPE_CHECKING:
    from clipx.distributed import Comm
    from clipx.objective.base import Objective
    from clipx.schedule import Length


@dataclass(kw_only=True, slots=True)
class ObjectiveSpec:
    """The base of all objectives' options."""

    kind: str = MISSING

    def build(self, comm: Comm, length: Length) -> Objective:
        """The objective; `length.epoch` is the size of the training set, which per-sample state needs."""
        raise NotImplementedError
