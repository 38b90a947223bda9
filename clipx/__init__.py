"""clipx trains CLIP models: Hydra groups compose into one typed run spec, which a plain PyTorch trainer runs.

from clipx import Trainer, compose
spec = compose("data=digits", "duration=5ep")
Trainer(spec).fit()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clipx.version import __version__

if TYPE_CHECKING:
    from clipx.trainer.spec import compose
    from clipx.trainer.trainer import Trainer

__all__ = ["Trainer", "__version__", "compose"]
_MODULES = {"Trainer": "clipx.trainer.trainer", "compose": "clipx.trainer.spec"}


def __getattr__(name: str) -> Any:
    """Imports an attribute on first use, so that only the trainer loads torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'clipx' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
