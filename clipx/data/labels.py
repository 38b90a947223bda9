"""Labels of samples as targets of an objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipx.data.images import Draw
from clipx.data.source import BadSample, Sample


@dataclass(frozen=True, slots=True)
class Labels:
    """`TargetSource` of the label of each sample: an index into `names`, 0-dim int64."""

    names: Sequence[str]

    def draw(self, index: int, draw: Draw) -> Draw:
        return draw

    def rows(self, index: int, sample: Sample, caption: str, crop: int = 0) -> tuple[Tensor, ...]:
        return (torch.tensor(self.number(sample.label)),)

    def number(self, label: int | str | None) -> int:
        """Returns the index of a label. Raises BadSample if it is missing, or is not a known name or index."""
        if label is None:
            raise BadSample("label is missing")
        if isinstance(label, str):
            if label not in self.names:
                raise BadSample(f"label {label!r} is not among the {len(self.names)} class names")
            return list(self.names).index(label)
        if not 0 <= label < len(self.names):
            raise BadSample(f"label {label} is out of range: there are {len(self.names)} class names")
        return label
