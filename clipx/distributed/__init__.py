"""Ranks: how they start, find each other and exchange tensors, and how the model is spread over them."""

from clipx.distributed.comm import Comm

__all__ = ["Comm"]
