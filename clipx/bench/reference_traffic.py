"""Bytes that the losses of open_clip and of FastCLIP's published code exchange in a step, by formula.

b samples on each of K ranks, embeddings of width D in float32. Read from `open_clip/loss.py` (3.3.0) and from
`src/training/train.py` (train_one_epoch), `src/training/distributed.py` (all_gather_tuple_tensor) and
`src/fast_clip/loss.py` (`local` of both classes) of https://github.com/Optimization-AI/fast_clip at commit c3ae1f5.
"""

from __future__ import annotations

from dataclasses import dataclass

from clipx.bench.loss import GATHERED, LOCAL, PLAIN, SIGLIP
from clipx.plan.traffic import CollectiveCounts, StepShape, Traffic, ddp_traffic

_FLOAT, _LONG = 4, 8  # bytes
OPEN_CLIP = (LOCAL, GATHERED, PLAIN, SIGLIP)


@dataclass(frozen=True, slots=True)
class PublishedFastCLIP:
    """Loss of FastCLIP's published code. A learned temperature is a parameter of its model: 4 bytes more in DDP."""

    name: str
    columns: int
    """Numbers per sample in the all_gather of per-sample state: u of image and text; with a temperature for each sample
    also both of the old and the new temperature, the bound, and the two averages of the gradient."""

    def traffic(self, shape: StepShape) -> Traffic:
        """Returns the traffic of a step: all_gathers of the embeddings, the state and both numbers of the sample."""
        found = ddp_traffic(shape)
        sizes = [2 * shape.dim * _FLOAT, self.columns * _FLOAT, 2 * _LONG]
        found.loss = {"all_gather": (len(sizes), shape.b * shape.ranks * sum(sizes))}
        return found


PUBLISHED = (
    PublishedFastCLIP("fast_clip: sogclr, v0, v1, v3", 2),
    PublishedFastCLIP("fast_clip: isogclr, v2", 12),
)


def open_clip_traffic(name: str, shape: StepShape, scatters: bool) -> Traffic:
    """Returns the traffic of a step with a loss of open_clip (`clipx.bench.baselines.open_clip`).

    `scatters`: the backward of an all_gather is K scatters, as with gloo, instead of one reduce_scatter. The gradients
    of the scale and the bias are not included: in open_clip's trainer they are 4 bytes each in DDP's all_reduce.
    """
    found, ranks = ddp_traffic(shape), shape.ranks
    side = shape.b * shape.dim * _FLOAT
    if name == SIGLIP:  # texts to each other rank, and their gradients back
        moved = 2 * (ranks - 1), 2 * (ranks - 1) * side
        found.loss = {"send": moved, "recv": moved}
        return found
    found.loss = {"all_gather": (2, 2 * ranks * side)}
    if name != PLAIN:
        found.loss["scatter" if scatters else "reduce_scatter"] = 2 * (ranks if scatters else 1), 2 * ranks * side
    return found


def scale_and_bias(name: str) -> CollectiveCounts:
    """Returns the collectives of the loss's parameters where it is an objective of clipx, which sums them apart from
    the model's."""
    return {"all_reduce": (1, (2 if name == SIGLIP else 1) * _FLOAT)}


def one_way(kinds: CollectiveCounts) -> int:
    """Returns the bytes of all kinds. A send is counted as the recv of another rank."""
    return sum(size for kind, (_, size) in kinds.items() if kind != "send")
