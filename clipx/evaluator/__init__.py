"""Evaluators, one file each, and the data sets that each is run on."""

from clipx.evaluator.spec import EvaluatorSpec

__all__ = ["EvaluatorSpec"]
