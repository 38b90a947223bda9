"""timm's conversion of an architecture's weights: original layouts, other image and patch sizes.

timm passes the conversion of an architecture to the function that loads its weights, and has no other way to it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor

from clipx.compat import timm_builder
from clipx.model.tower_spec import ImageTowerSpec
from clipx.model.vision import trunk_options

_LOCK = threading.Lock()


@dataclass(slots=True)
class TimmFilter:
    """Conversion of weights to the names and shapes of a trunk. `model`: the trunk on the meta device."""

    model: Any = None
    function: Callable[..., Mapping[str, Tensor]] | None = None
    classifiers: tuple[str, ...] = ()

    @classmethod
    def record(cls, spec: ImageTowerSpec) -> TimmFilter:
        """Builds the trunk on the meta device, and records how timm would load its weights. Fetches nothing."""
        with recorded_loading() as found, torch.device("meta"):
            found.model = timm.create_model(spec.architecture, pretrained=True, num_classes=0, **trunk_options(spec))
        return found

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors by the names of the trunk, with those of the classifier."""
        if self.function is None:
            return dict(tensors)
        two = len(inspect.signature(self.function).parameters) > 1  # filters of some architectures take tensors alone
        return dict(self.function(dict(tensors), self.model) if two else self.function(dict(tensors)))

    def is_classifier(self, name: str) -> bool:
        """Returns whether a tensor that the trunk does not have belongs to the classifier."""
        return name.startswith(tuple(f"{part.partition('.')[0]}." for part in self.classifiers))


@contextmanager
def recorded_loading() -> Iterator[TimmFilter]:
    """Context in which timm.create_model(pretrained=True) loads nothing. Yields the conversion that it would use."""
    found = TimmFilter()

    def record(model: Any, pretrained_cfg: Mapping[str, Any], **options: Any) -> None:
        found.function = options.get("filter_fn")
        names = pretrained_cfg.get("classifier") or ()
        found.classifiers = (names,) if isinstance(names, str) else tuple(names)

    with _LOCK:
        before = timm_builder.load_pretrained
        timm_builder.load_pretrained = record
        try:
            yield found
        finally:
            timm_builder.load_pretrained = before
