"""Times of collectives by the alpha-beta model, over nodes of several GPUs each.

A message of n bytes over a link takes α + n/β (Hockney 1994). Collectives are the usual bandwidth-optimal ones (Thakur,
Rabenseifner, Gropp 2005), in two levels: each GPU talks to those of its own node, and to the one of its number in each
other node, by an adapter of its own. Notation: N nodes, G GPUs in each, K = N·G, n bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """From one GPU to another: α in s, β in bytes/s, in one direction."""

    latency: float
    bandwidth: float

    def time(self, messages: float, size: float) -> float:
        """So many messages one after the other, of `size` bytes together."""
        return messages * self.latency + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class Cluster:
    """K = nodes x gpus ranks."""

    nodes: int
    gpus: int  # of a node
    within: Link
    between: Link

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    def all_gather(self, size: float) -> float:
        """`size` bytes on each rank afterwards: rings between the nodes, then one in each node."""
        n, g = self.nodes, self.gpus
        outer = self.between.time(n - 1, (n - 1) * size / self.ranks)
        return outer + self.within.time(g - 1, (g - 1) * size / g)

    def reduce_scatter(self, size: float) -> float:
        """`size` bytes on each rank before: an all_gather the other way round."""
        return self.all_gather(size)

    def all_reduce(self, size: float) -> float:
        """`size` bytes: reduced and scattered in each node, summed between the nodes, gathered again in each node.

        Between the nodes a ring, or a tree where that is faster: fewer steps, in pieces that follow each other.
        """
        n, g = self.nodes, self.gpus
        inner = 2 * self.within.time(g - 1, (g - 1) * size / g)
        ring = self.between.time(2 * (n - 1), 2 * (n - 1) * size / self.ranks)
        tree = self.between.time(2 * math.ceil(math.log2(n)), 2 * size / g)
        return inner + (min(ring, tree) if n > 1 else 0.0)

    def broadcast(self, size: float) -> float:
        """`size` bytes from one rank, down a tree of nodes and one in each node."""
        n, g = (math.ceil(math.log2(count)) for count in (self.nodes, self.gpus))
        return self.between.time(n, size if n else 0.0) + self.within.time(g, size if g else 0.0)

    def time(self, kind: str, calls: float, size: float) -> float:
        """Of so many collectives of a kind, of `size` bytes together."""
        return calls * {
            "all_gather": self.all_gather,
            "reduce_scatter": self.reduce_scatter,
            "all_reduce": self.all_reduce,
            "broadcast": self.broadcast,
        }[kind](size / calls)


def one_node(ranks: int, link: Link) -> Cluster:
    return Cluster(1, ranks, link, link)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a collective over `ranks` processes of one node took."""

    kind: str
    ranks: int
    size: int  # bytes
    seconds: float


def fitted(measured: Sequence[Measured]) -> Link:
    """The link that explains them best: least squares of the relative errors, for times span decades.

    The model is linear in α and 1/β; neither comes out below zero. There must be at least two, that differ.
    """
    rows = [(*_work(m.kind, m.ranks, m.size), m.seconds) for m in measured]
    latency, inverse = _least_squares([(a / t, b / t) for a, b, t in rows])
    if latency < 0:
        latency, inverse = 0.0, _single([b / t for _, b, t in rows])
    elif inverse <= 0:
        latency, inverse = _single([a / t for a, _, t in rows]), 0.0
    return Link(latency, 1 / inverse if inverse else math.inf)


def _work(kind: str, ranks: int, size: int) -> tuple[float, float]:
    """How often the collective takes a latency, and how many bytes go through a link."""
    messages = one_node(ranks, Link(1.0, math.inf)).time(kind, 1, size)
    return messages, one_node(ranks, Link(0.0, 1.0)).time(kind, 1, size)


def _least_squares(rows: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """x, y that make a·x + b·y nearest to 1."""
    aa = ab = bb = a1 = b1 = 0.0
    for a, b in rows:
        aa, ab, bb, a1, b1 = aa + a * a, ab + a * b, bb + b * b, a1 + a, b1 + b
    determinant = aa * bb - ab * ab
    return (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant


def _single(values: Sequence[float]) -> float:
    return sum(values) / sum(v * v for v in values)
