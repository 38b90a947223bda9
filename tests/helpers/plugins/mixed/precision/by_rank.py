"""A number format that differs between ranks, as precision=auto does on devices of two generations."""

import os
from dataclasses import dataclass

from clipx.config.registry import option
from clipx.precision.spec import AutoSpec, PrecisionSpec


@option("precision")
@dataclass(kw_only=True, slots=True)
class ByRankSpec(AutoSpec):
    kind: str = "by_rank"

    def resolve(self, bf16: bool) -> PrecisionSpec:
        return AutoSpec.resolve(self, os.environ.get("RANK") == "1")
