"""Times of collectives by the alpha-beta model, over nodes of several GPUs each.

A message of n bytes over a link takes α + n/β (Hockney 1994). Collectives are the usual bandwidth-optimal ones (Thakur,
Rabenseifner, Gropp 2005), in two levels: each GPU talks to those of its own node, and to the one of its number in each
other node, by an adapter of its own. Notation: N nodes, G GPUs in each, K = N·G, n bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


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
class CollectiveTime:
    """What a collective over `ranks` processes of one node took."""

    kind: str
    ranks: int
    size: int  # bytes
    seconds: float


def fit_link(measured: Sequence[CollectiveTime]) -> Link:
    """The link that explains them best: least squares of the relative errors, for times span decades.

    The model is linear in α and 1/β; neither comes out below zero. There must be at least two, that differ.
    """
    import numpy as np  # late, as in _solve: composition imports the benchmarks' options, which hold a Link

    terms_M2 = np.array([_terms(m.kind, m.ranks, m.size) for m in measured]) / np.array([[m.seconds] for m in measured])
    latency, inverse = _solve(terms_M2)
    if latency < 0:
        latency, inverse = 0.0, *_solve(terms_M2[:, 1:])
    elif inverse <= 0:
        latency, inverse = *_solve(terms_M2[:, :1]), 0.0
    return Link(latency, 1 / inverse if inverse else math.inf)


def _terms(kind: str, ranks: int, size: int) -> tuple[float, float]:
    """How often the collective takes a latency, and how many bytes go through a link."""
    messages = one_node(ranks, Link(1.0, math.inf)).time(kind, 1, size)
    return messages, one_node(ranks, Link(0.0, 1.0)).time(kind, 1, size)


def _solve(terms: np.ndarray) -> list[float]:
    """The least-squares solution of terms · x = 1."""
    import numpy as np

    x: list[float] = np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)[0].tolist()
    return x
