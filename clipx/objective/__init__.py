"""Objectives: losses of the local batch of embeddings against the global batch. Each has one YAML; variants of one loss
share a file."""

from clipx.config.registry import declare
from clipx.objective.spec import ObjectiveSpec

__all__ = ["ObjectiveSpec"]

declare("objective", "clipx.objective.infonce", "dcl")
declare(
    "objective",
    "clipx.objective.fastclip",
    "sogclr",
    "isogclr",
    "fastclip_v0",
    "fastclip_v1",
    "fastclip_v2",
    "fastclip_v3",
)
