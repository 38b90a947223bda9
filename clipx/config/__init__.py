"""Typed specs from Hydra configurations. What a plug-in needs to declare options."""

from clipx.config.duration import Length
from clipx.config.registry import MISSING, option

__all__ = ["MISSING", "Length", "option"]
