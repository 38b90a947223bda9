"""The spec of a run as it is saved."""

from __future__ import annotations

from dataclasses import replace

from clipx.distributed.comm import Comm
from clipx.trainer.saved_run import pin_normalization, pin_sources
from clipx.trainer.spec import RunSpec


def resolve(spec: RunSpec, comm: Comm) -> RunSpec:
    """Returns the spec of this run as it is saved."""
    pin_normalization(spec, comm)
    return replace(spec, run_dir=comm.broadcast_object(spec.run_dir), data=pin_sources(spec, comm))
