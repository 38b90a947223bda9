"""SogCLR: the global contrastive loss with a constant temperature and a constant γ."""

from __future__ import annotations

from dataclasses import dataclass

from clipx.config.registry import option
from clipx.objective.fcco import ConstantTemperatureSpec


@option("objective")
@dataclass(kw_only=True, slots=True)
class SogCLRSpec(ConstantTemperatureSpec):
    """τ ½mean[log(ε+g1) + log(ε+g2)] over the data set (arXiv:2202.12387)."""

    kind: str = "sogclr"
    """Type of the objective; set by objective=sogclr."""
