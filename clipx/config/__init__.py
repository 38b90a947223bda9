"""Typed specs from Hydra configurations. Plug-ins import `option`, `MISSING` and `Length` from here."""

from clipx.config.duration import Length
from clipx.config.registry import MISSING, option

__all__ = ["MISSING", "Length", "option"]
