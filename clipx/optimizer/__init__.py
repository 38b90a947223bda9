"""Optimizers over the parameter groups of `groups`. Each has one file."""

from clipx.optimizer.spec import Group, OptimizerSpec

__all__ = ["Group", "OptimizerSpec"]
