"""Typed specs from Hydra configurations: what the options of a plug-in are written with."""

from clipx.config.duration import Length
from clipx.config.options import option
from clipx.config.registry import MISSING, frozen, register

__all__ = ["MISSING", "Length", "frozen", "option", "register"]
