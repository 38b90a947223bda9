"""Objectives: what scores the local batch of embeddings against the global one. One file and one YAML each."""

from clipx.objective.spec import ObjectiveSpec

__all__ = ["ObjectiveSpec"]
