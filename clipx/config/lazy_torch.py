"""Lazy import of torch. Modules that define a spec are imported at composition, which must not wait for torch."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


if TYPE_CHECKING:
    import torch as torch
    import torch.distributed as dist
else:
    torch = _Lazy("torch")
    dist = _Lazy("torch.distributed")

__all__ = ["dist", "torch"]
