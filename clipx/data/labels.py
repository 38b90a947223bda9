"""Labels of samples as what an objective is given with each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipx.data.source import BadSample, Sample


@dataclass(frozen=True, slots=True)
class Labels:
    """A `TargetSource` of each sample's label as an index into `names`, 0-dim int64."""

    names: Sequence[str]

    def rows(self, index: int, sample: Sample, caption: str) -> tuple[Tensor, ...]:
        return (torch.tensor(self.number(sample.label)),)

    def number(self, label: int | str | None) -> int:
        """Raises BadSample where there is no label, or no class of that name or number."""
        if label is None:
            raise BadSample("label is missing")
        if isinstance(label, str):
            if label not in self.names:
                raise BadSample(f"label {label!r} is not among the {len(self.names)} class names")
            return list(self.names).index(label)
        if not 0 <= label < len(self.names):
            raise BadSample(f"label {label} is out of step with the {len(self.names)} class names")
        return label
