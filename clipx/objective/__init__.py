"""Objectives: losses of the local batch of embeddings against the global batch. Each has one YAML; variants of one loss
share a file."""

from clipx.config.registry import declare
from clipx.objective.spec import ObjectiveSpec

__all__ = ["ObjectiveSpec"]

declare("objective", "clipx.objective.infonce", "dcl", "siglip")
declare("objective", "clipx.objective.fastclip", "sogclr", "isogclr", *(f"fastclip_v{i}" for i in range(4)))
