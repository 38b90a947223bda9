"""Objectives: losses of the local batch of embeddings against the global batch. Each has one YAML; variants of one loss
share a file."""

from clipx.objective import fastclip  # registers options that have no file of their name
from clipx.objective.spec import ObjectiveSpec

__all__ = ["ObjectiveSpec", "fastclip"]
