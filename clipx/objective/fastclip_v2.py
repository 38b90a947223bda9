"""FastCLIP v2: the robust global contrastive loss with a learned temperature for each sample."""

from __future__ import annotations

from dataclasses import dataclass

from clipx.config.registry import option
from clipx.objective.fcco import SampleTemperatureSpec


@option("objective")
@dataclass(kw_only=True, slots=True)
class FastCLIPv2Spec(SampleTemperatureSpec):
    """½mean[τ1_i (log(ε+g1_i) + ρ) + τ2_i (log(ε+g2_i) + ρ)] over the data set (arXiv:2407.01445)."""

    kind: str = "fastclip_v2"
    """Type of the objective; set by objective=fastclip_v2."""
