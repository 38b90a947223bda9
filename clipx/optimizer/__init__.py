"""Optimizers over the parameter groups of `groups`."""

from clipx.optimizer.spec import Group, OptimizerSpec

__all__ = ["Group", "OptimizerSpec"]
