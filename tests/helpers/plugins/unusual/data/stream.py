"""Samples without numbers, as they arrive."""

from typing import ClassVar

from clipx.config import frozen, register
from clipx.data.spec import DataSpec


@register("data")
@frozen
class StreamSpec(DataSpec):
    """Samples without numbers, as they arrive."""

    indexed: ClassVar[bool] = False
    kind: str = "stream"
