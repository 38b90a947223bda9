"""Typed specs from Hydra configurations. Plug-ins import `option`, `frozen`, `MISSING` and `Length` from here."""

from clipx.config.duration import Length
from clipx.config.registry import MISSING, frozen, option

__all__ = ["MISSING", "Length", "frozen", "option"]
