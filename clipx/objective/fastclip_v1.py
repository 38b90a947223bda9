"""FastCLIP v1: the global contrastive loss with a constant temperature and a scheduled γ."""

from __future__ import annotations

from dataclasses import dataclass

from clipx.config.registry import option
from clipx.objective.fcco import ConstantTemperatureSpec


@option("objective")
@dataclass(kw_only=True, slots=True)
class FastCLIPv1Spec(ConstantTemperatureSpec):
    """τ ½mean[log(ε+g1) + log(ε+g2)] over the data set (arXiv:2407.01445)."""

    kind: str = "fastclip_v1"
    """Type of the objective; set by objective=fastclip_v1."""
