"""clipx trains CLIP models: Hydra groups compose into one typed run spec, a plain PyTorch trainer consumes it.

from clipx import Trainer, compose
spec = compose("data=digits", "duration=5ep")
Trainer(spec).fit()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clipx.version import __version__

if TYPE_CHECKING:
    from clipx.trainer.spec import compose
    from clipx.trainer.trainer import Trainer

__all__ = ["Trainer", "__version__", "compose"]


def __getattr__(name: str) -> Any:
    """Loads torch only for those who ask for the trainer."""
    if name == "Trainer":
        from clipx.trainer.trainer import Trainer

        return Trainer
    if name == "compose":
        from clipx.trainer.spec import compose

        return compose
    raise AttributeError(f"module 'clipx' has no attribute {name!r}")
