"""Optimizers over the parameter groups of `groups`. Each has one file."""

from clipx.optimizer.spec import OptimizerSpec

__all__ = ["OptimizerSpec"]
