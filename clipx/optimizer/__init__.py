"""Optimizers, one file each, over the parameter groups of `groups`."""

from clipx.optimizer.spec import OptimizerSpec

__all__ = ["OptimizerSpec"]
