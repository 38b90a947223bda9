"""iSogCLR: the robust global contrastive loss with a learned temperature for each sample, and a constant γ."""

from __future__ import annotations

from dataclasses import dataclass

from clipx.config.registry import option
from clipx.objective.fcco import SampleTemperatureSpec


@option("objective")
@dataclass(kw_only=True, slots=True)
class ISogCLRSpec(SampleTemperatureSpec):
    """½mean[τ1_i (log(ε+g1_i) + ρ) + τ2_i (log(ε+g2_i) + ρ)] over the data set (arXiv:2305.11965)."""

    kind: str = "isogclr"
    """Type of the objective; set by objective=isogclr."""
