"""Evaluators, one file each, and the data sets that they evaluate."""

from clipx.evaluator.spec import EvaluatorSpec

__all__ = ["EvaluatorSpec"]
