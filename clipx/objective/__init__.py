"""Objectives: losses of the local batch of embeddings against the global batch. Each has one file and one YAML."""

from clipx.objective.spec import ObjectiveSpec

__all__ = ["ObjectiveSpec"]
