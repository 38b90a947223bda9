"""A way of distribution that nothing is known of."""

from clipx.config import frozen, register
from clipx.distributed.spec import DistributedSpec


@register("distributed")
@frozen
class MeshSpec(DistributedSpec):
    """A way of distribution that nothing is known of."""

    kind: str = "mesh"
