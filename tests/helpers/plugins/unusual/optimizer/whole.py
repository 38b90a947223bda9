"""An optimizer that needs whole parameters."""

from clipx.config import frozen, register
from clipx.optimizer.spec import OptimizerSpec


@register("optimizer")
@frozen
class WholeSpec(OptimizerSpec):
    """An optimizer that needs whole parameters."""

    kind: str = "whole"
