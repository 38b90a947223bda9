"""CoCa (arXiv:2205.01917): its model and objective, open_clip's weights of it, and the command that captions images."""

from clipx.config.registry import declare

declare("model", "clipx.extra.coca.spec", "coca")
declare("objective", "clipx.extra.coca.objective", "coca")
