"""Imports the modules that register options. The entry point clipx.options of pyproject.toml names this module.

Every command of clipx imports it, so nothing here imports torch.
"""

from my_clipx import hardest_negative, sidecar

__all__ = ["hardest_negative", "sidecar"]
