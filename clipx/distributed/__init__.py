"""Distributed training: launch environment, rendezvous, collectives, and data-parallel wrappers (DDP, FSDP)."""

from clipx.distributed.comm import Comm

__all__ = ["Comm"]
