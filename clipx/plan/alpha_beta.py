"""Times of collectives in the alpha-beta model, over nodes of several GPUs each.

A message of n bytes over a link takes α + n/β (Hockney 1994). Collectives are the usual bandwidth-optimal ones (Thakur,
Rabenseifner, Gropp 2005), in two levels: each GPU exchanges messages with the GPUs of its node, and with the GPU of the
same local rank in each other node through a separate adapter. Notation: N nodes, G GPUs in each, K = N·G, n bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Link from one GPU to another: latency α in s, bandwidth β in bytes/s in one direction."""

    latency: float
    bandwidth: float

    def time(self, messages: float, size: float) -> float:
        """Returns the seconds of `messages` consecutive messages of `size` bytes in total."""
        return messages * self.latency + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class Cluster:
    """Cluster of K = nodes x gpus ranks. Methods return seconds; `size` is in bytes."""

    nodes: int
    gpus: int  # in each node
    within: Link
    between: Link

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    def all_gather(self, size: float) -> float:
        """Time of an all_gather with an output of `size` bytes: rings between the nodes, then a ring in each node."""
        n, g = self.nodes, self.gpus
        outer = self.between.time(n - 1, (n - 1) * size / self.ranks)
        return outer + self.within.time(g - 1, (g - 1) * size / g)

    def reduce_scatter(self, size: float) -> float:
        """Time of a reduce_scatter with an input of `size` bytes: that of the all_gather, its reverse."""
        return self.all_gather(size)

    def all_reduce(self, size: float) -> float:
        """Time of an all_reduce of `size` bytes: reduce_scatter in each node, sum between nodes, all_gather in each
        node.

        The sum between nodes uses a ring, or a pipelined tree, which takes fewer steps, if that is faster.
        """
        n, g = self.nodes, self.gpus
        inner = 2 * self.within.time(g - 1, (g - 1) * size / g)
        ring = self.between.time(2 * (n - 1), 2 * (n - 1) * size / self.ranks)
        tree = self.between.time(2 * math.ceil(math.log2(n)), 2 * size / g)
        return inner + (min(ring, tree) if n > 1 else 0.0)

    def broadcast(self, size: float) -> float:
        """Time of a broadcast of `size` bytes from one rank, by a tree of nodes and a tree in each node."""
        n, g = (math.ceil(math.log2(count)) for count in (self.nodes, self.gpus))
        return self.between.time(n, size if n else 0.0) + self.within.time(g, size if g else 0.0)

    def time(self, kind: str, calls: float, size: float) -> float:
        """Time of `calls` collectives of one kind, of `size` bytes in total."""
        return calls * {
            "all_gather": self.all_gather,
            "reduce_scatter": self.reduce_scatter,
            "all_reduce": self.all_reduce,
            "broadcast": self.broadcast,
        }[kind](size / calls)

    def total(self, kinds: Mapping[str, tuple[int, int]]) -> float:
        """Time of collectives by kind, each with its number of calls and its bytes in total."""
        return sum(self.time(kind, calls, size) for kind, (calls, size) in kinds.items())
